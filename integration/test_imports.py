"""Each package declares its imports and has the files that all packages have."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]

MEMBERS = {
    "dataplane_core": "packages/dataplane-core",
    "dataplane_tq": "packages/dataplane-tq",
    "column_io": "packages/column-io",
    "rollout_actor": "packages/rollout-actor",
    "refit_mx": "packages/refit-mx",
    "observability": "packages/observability",
    "dataplane_admin": "services/admin",
    "grpo_trainer": "services/trainer",
    "refit_server": "services/refit-server",
}
PACKAGE_OF = {  # import name -> distribution, where they differ
    "google": "protobuf",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "opentelemetry": "opentelemetry-api",  # the SDK and the protobuf messages come with extras
    "transfer_queue": "transferqueue",
    "typing_extensions": "typing-extensions",
    "yaml": "pyyaml",
    "modelexpress_rl": "modelexpress",
    "zmq": "pyzmq",
}
OVERRIDES = {("dataplane_admin", "opentelemetry"): "opentelemetry-proto"}  # and not the API
NOT_IMPORTED = {
    "dataplane_admin": {"python-multipart", "tzdata"},  # read by starlette, and by zoneinfo
    "grpo_trainer": {"dataplane-tq", "observability"},  # loaded by entry points
}
WITH_EXTRA = {
    ("dataplane_admin", "dataplane_tq"),
    ("dataplane_admin", "psycopg"),
    ("dataplane_admin", "ray"),
    ("dataplane_core", "hypothesis"),
    ("dataplane_core", "numpy"),
    ("dataplane_core", "pytest"),
    ("dataplane_core", "safetensors"),
    ("dataplane_core", "tensordict"),
    ("dataplane_core", "torch"),
    ("dataplane_tq", "nemo_rl"),  # in the environment of NeMo-RL
    ("observability", "google"),  # protobuf, a dependency of opentelemetry-proto
    ("observability", "jinja2"),
    ("observability", "typer"),
    ("observability", "ray"),  # of SkyRL
    ("observability", "skyrl"),
    ("observability", "tensordict"),  # loaded only with samples, which need it too
    ("observability", "torch"),
    ("observability", "transformers"),  # of TRL
    ("observability", "trl"),
    ("observability", "verl"),  # in the environment of verl
    ("observability", "prometheus_client"),
    ("observability", "requests"),
    ("observability", "urllib3"),
    ("observability", "wrapt"),
    ("observability", "rich"),
    ("dataplane_admin", "psutil"),
    ("dataplane_admin", "pynvml"),
    ("dataplane_admin", "requests"),
    ("grpo_trainer", "httpx"),
    ("grpo_trainer", "mlflow"),
    ("grpo_trainer", "wandb"),
    ("refit_mx", "httpx"),
    ("rollout_actor", "httpx"),
    ("rollout_actor", "nemo_rl"),  # in the environment of NeMo-RL
    ("refit_mx", "vllm"),  # the engine that loads refit-mx, in a separate environment
}
# Modules that pages or a README name, besides each package itself, and those that tests import.
PUBLIC_MODULES = {
    "dataplane_admin.cli",
    "dataplane_admin.models",
    "dataplane_core.boundary",
    "dataplane_core.declaration",
    "dataplane_core.errors",
    "dataplane_core.held_claim",  # its function has the same name
    "dataplane_core.key_value",
    "dataplane_core.ledger",
    "dataplane_core.ledger.actions",
    "dataplane_core.ledger.inspect",
    "dataplane_core.ledger.scan",
    "dataplane_core.schema",
    "dataplane_core.telemetry",
    "dataplane_core.tensors",
    "dataplane_core.tensors.columns",
    "dataplane_core.tensors.object_codec",
    "dataplane_core.tensors.object_types",
    "dataplane_core.tensors.rows",
    "dataplane_core.testing",
    "dataplane_core.testing.claims",
    "dataplane_core.testing.storage",
    "dataplane_tq.nemo_rl",
    "dataplane_tq.storage",
    "grpo_trainer.cli",
    "grpo_trainer.errors",
    "grpo_trainer.trace_cli",
    "grpo_trainer.what_if",
    "observability.adapters",
    "observability.adapters.skyrl",
    "observability.adapters.transfer_queue",
    "observability.adapters.trl",
    "observability.adapters.verl",
    "observability.cli",
    "observability.receiver",
    "observability.records",
    "observability.setup",
    "observability.views",
    "observability.views.critical_path",  # these three: a function has the same name
    "observability.views.printable",
    "observability.views.why",
    "refit_mx.compile",
    "refit_mx.compile.base",
    "refit_mx.control",
    "refit_mx.engine",
    "refit_mx.engine.status",
    "refit_mx.fleet",
    "refit_mx.fleet.barrier",
    "refit_mx.transports",
    "refit_mx.transports.base",
    "refit_server.cli",
    "rollout_actor.nemo_rl",
    "rollout_actor.vllm",
}


def imported(package: str) -> dict[str, set[str]]:
    """Return the files of ``package`` that import a module anywhere, by top-level module."""
    importers: dict[str, set[str]] = {}
    for path in sorted((ROOT / MEMBERS[package] / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}: relative import"
                names = [node.module or ""]
            else:
                continue
            for name in names:
                importers.setdefault(name.split(".")[0], set()).add(str(path.relative_to(ROOT)))
    return importers


@pytest.mark.parametrize("package", MEMBERS)
def test_package_declares_exactly_what_it_imports(package: str) -> None:
    project = tomllib.loads((ROOT / MEMBERS[package] / "pyproject.toml").read_text())["project"]
    declared = {
        requirement.split(">")[0].split("[")[0].strip().lower()
        for requirement in project["dependencies"]
    }
    third_party = {
        OVERRIDES.get((package, name)) or PACKAGE_OF.get(name, name.replace("_", "-"))
        for name in imported(package)
        if name not in sys.stdlib_module_names
        and name != package
        and (package, name) not in WITH_EXTRA
    }
    assert third_party | NOT_IMPORTED.get(package, set()) == declared


def test_every_workspace_member_is_covered() -> None:
    members = {
        str(path.parent.relative_to(ROOT))
        for kind in ("packages", "services")
        for path in (ROOT / kind).glob("*/pyproject.toml")
    }
    assert members == set(MEMBERS.values())


def names_imported(tree: ast.AST) -> set[str]:
    """Return the modules that a file imports, and the names that it imports from them."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def test_tests_that_import_internals_say_why() -> None:
    """Tests use public names, so that modules can move; a docstring gives the reason if not."""
    modules = {
        ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
        for package, folder in MEMBERS.items()
        for source in [ROOT / folder / "src"]
        for path in (source / package).rglob("*.py")
    }
    assert not PUBLIC_MODULES - modules, "these modules do not exist"
    internal = modules - PUBLIC_MODULES - set(MEMBERS)
    silent = []
    for pattern in ("packages/*/tests/**/*.py", "services/*/tests/**/*.py", "integration/**/*.py"):
        for path in sorted(ROOT.glob(pattern)):
            tree = ast.parse(path.read_text())
            imported_internals = sorted(names_imported(tree) & internal)
            if imported_internals and "internals" not in (ast.get_docstring(tree) or ""):
                silent.append(f"{path.relative_to(ROOT)} imports {', '.join(imported_internals)}")
    assert not silent, "say 'Imports internals: <reason>.' in the docstrings of these files"


def lacking(root: Path) -> list[str]:
    """Return the files and changes missing from the workspace members below ``root``."""
    missing = []
    for package, folder in MEMBERS.items():
        member = root / folder
        files = ("README.md", "CHANGELOG.md", "LICENSE", f"src/{package}/py.typed", "tests")
        wanted = [*files, "changelog.d"]
        missing += [f"{folder}/{name}" for name in wanted if not (member / name).exists()]
        # The changelog has released changes, changelog.d the others.
        version = tomllib.loads((member / "pyproject.toml").read_text())["project"]["version"]
        released = f"\n## {version} (" in (member / "CHANGELOG.md").read_text()
        if not released and not list((member / "changelog.d").glob("*.md")):
            missing.append(f"{folder}: changes of version {version}")
    return missing


def test_every_member_has_the_same_files() -> None:
    assert lacking(ROOT) == []


def test_towncrier_finds_every_changelog_fragment() -> None:
    for folder in MEMBERS.values():
        done = subprocess.run(
            [sys.executable, "-m", "towncrier", "build", "--draft", "--version", "1.2.3"],
            cwd=ROOT / folder,
            capture_output=True,
            text=True,
            check=True,
        )
        for fragment in (ROOT / folder / "changelog.d").glob("*.md"):
            assert fragment.read_text().strip()[:40] in done.stdout, f"{folder}: {fragment.name}"


@pytest.mark.parametrize("package", MEMBERS)
def test_every_dependency_has_a_lower_bound(package: str) -> None:
    project = tomllib.loads((ROOT / MEMBERS[package] / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project.get("optional-dependencies", {}).values()]
    for requirement in (Requirement(each) for group in groups for each in group):
        operators = {each.operator for each in requirement.specifier}
        self_reference = requirement.name == project["name"]  # an extra that includes another one
        assert self_reference or operators & {">=", "==", "~="}, requirement


@pytest.mark.parametrize("package", MEMBERS)
def test_msgspec_decoders_are_made_once(package: str) -> None:
    # msgspec crashes the process if two threads decode into a new type at once. So decoders are
    # made at import or under a lock, and decode(..., type=...) is not used.
    calls = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted((ROOT / MEMBERS[package] / "src").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("msgspec.msgpack.decode", "msgspec.json.decode")
        and any(keyword.arg == "type" for keyword in node.keywords)
    ]
    assert not calls


OBSERVED = """
from dataplane_core import build_data_plane_client

build_data_plane_client({"enabled": True, "impl": "in_memory", "observability": {"enabled": True}})
"""


@pytest.mark.parametrize(
    "program",
    ["import dataplane_admin", "import grpo_trainer", OBSERVED],
    ids=["admin", "trainer", "middleware"],
)
@pytest.mark.parametrize("name", ["observability/__init__.py", "observability.py"])
def test_shadowed_package_is_named_in_the_error(program: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.touch()
    command = [sys.executable, "-c", program]  # finds what is in its working directory
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    shadow = path.parent if path.name == "__init__.py" else path
    error = done.stderr.splitlines()[-1]
    assert error.startswith(
        f"ImportError: package 'observability': found {shadow}, which is not the"
    )
