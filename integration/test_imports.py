"""Imports point one way, and heavy parts are imported only where they belong."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]

OURS = {
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
PACKAGES = {name for name, folder in OURS.items() if folder.startswith("packages/")}
MAY_IMPORT = {
    "dataplane_core": set(),
    "dataplane_tq": {"dataplane_core"},
    "column_io": {"dataplane_core"},
    "rollout_actor": {"column_io", "dataplane_core"},
    "refit_mx": set(),
    "observability": {"dataplane_core"},
    "dataplane_admin": PACKAGES,
    "grpo_trainer": PACKAGES,
    "refit_server": PACKAGES,
}
ONLY_IN = {
    "transfer_queue": {"dataplane_tq"},
    "modelexpress": {"refit_mx", "refit_server"},
    "modelexpress_rl": {"refit_mx", "refit_server"},
    "nixl": {"refit_mx", "refit_server"},
    "ray": {
        "dataplane_tq",
        "rollout_actor",
        "observability",
        "dataplane_admin",
        "grpo_trainer",
        "refit_server",
    },
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
OWN_PACKAGE_OF = {("dataplane_admin", "opentelemetry"): "opentelemetry-proto"}  # and not the API
NOT_IMPORTED = {
    "dataplane_admin": {"python-multipart"},  # starlette reads forms by it
    "grpo_trainer": {"dataplane-tq", "observability"},  # found by entry points
}
WITH_EXTRA = {
    ("dataplane_admin", "dataplane_tq"),
    ("dataplane_admin", "ray"),
    ("dataplane_core", "hypothesis"),
    ("dataplane_core", "pytest"),
    ("dataplane_core", "safetensors"),
    ("observability", "google"),  # protobuf, of opentelemetry-proto
    ("observability", "jinja2"),
    ("observability", "prometheus_client"),
    ("observability", "requests"),
    ("observability", "urllib3"),
    ("observability", "rich"),
    ("refit_mx", "httpx"),
    ("refit_mx", "vllm"),  # the engine that loads refit-mx, in its own environment
}


def imported(package: str) -> dict[str, set[str]]:
    """Top-level module to the files of ``package`` that import it, wherever in the file."""
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / OURS[package] / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}: relative import"
                names = [node.module or ""]
            else:
                continue
            for name in names:
                found.setdefault(name.split(".")[0], set()).add(str(path.relative_to(ROOT)))
    return found


@pytest.mark.parametrize("package", OURS)
def test_every_arrow_between_our_packages_is_allowed(package: str) -> None:
    arrows = {name: files for name, files in imported(package).items() if name in OURS}
    arrows.pop(package, None)
    strange = {name: files for name, files in arrows.items() if name not in MAY_IMPORT[package]}
    assert not strange


@pytest.mark.parametrize("package", OURS)
def test_heavy_parts_are_imported_only_where_they_belong(package: str) -> None:
    strange = {
        name: files
        for name, files in imported(package).items()
        if name in ONLY_IN and package not in ONLY_IN[name]
    }
    assert not strange


@pytest.mark.parametrize("package", OURS)
def test_what_a_package_imports_it_declares_and_what_it_declares_it_imports(package: str) -> None:
    project = tomllib.loads((ROOT / OURS[package] / "pyproject.toml").read_text())["project"]
    declared = {
        requirement.split(">")[0].split("[")[0].strip().lower()
        for requirement in project["dependencies"]
    }
    third_party = {
        OWN_PACKAGE_OF.get((package, name)) or PACKAGE_OF.get(name, name.replace("_", "-"))
        for name in imported(package)
        if name not in sys.stdlib_module_names
        and name != package
        and (package, name) not in WITH_EXTRA
    }
    assert third_party | NOT_IMPORTED.get(package, set()) == declared


def test_every_member_of_the_workspace_is_covered() -> None:
    members = {
        str(path.parent.relative_to(ROOT))
        for kind in ("packages", "services")
        for path in (ROOT / kind).glob("*/pyproject.toml")
    }
    assert members == set(OURS.values())


def lacking(root: Path) -> list[str]:
    """What members of the workspace in a folder lack of the skeleton that all have."""
    found = []
    for package, folder in OURS.items():
        member = root / folder
        files = ("README.md", "CHANGELOG.md", "LICENSE", f"src/{package}/py.typed", "tests")
        wanted = [*files, "changelog.d"]
        found += [f"{folder}/{name}" for name in wanted if not (member / name).exists()]
        # What is released now is in the changelog, what is not yet in fragments.
        version = tomllib.loads((member / "pyproject.toml").read_text())["project"]["version"]
        told = f"\n## {version} (" in (member / "CHANGELOG.md").read_text()
        if not told and not list((member / "changelog.d").glob("*.md")):
            found.append(f"{folder}: a word about version {version}")
    return found


def test_every_member_has_the_same_skeleton() -> None:
    assert lacking(ROOT) == []


def test_every_changelog_fragment_is_found_by_towncrier() -> None:
    for folder in OURS.values():
        done = subprocess.run(
            [sys.executable, "-m", "towncrier", "build", "--draft", "--version", "1.2.3"],
            cwd=ROOT / folder,
            capture_output=True,
            text=True,
            check=True,
        )
        for fragment in (ROOT / folder / "changelog.d").glob("*.md"):
            assert fragment.read_text().strip()[:40] in done.stdout, f"{folder}: {fragment.name}"


def test_every_dependency_floor_says_why() -> None:
    for path in [ROOT / "pyproject.toml", *ROOT.glob("*/*/pyproject.toml")]:
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            if line.startswith('    "') and (">=" in line or line.startswith('    "types-')):
                assert " # " in line, f"{path.relative_to(ROOT)}:{number}: {line.strip()}"


@pytest.mark.parametrize("package", OURS)
def test_every_dependency_has_a_floor(package: str) -> None:
    project = tomllib.loads((ROOT / OURS[package] / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project.get("optional-dependencies", {}).values()]
    for requirement in (Requirement(each) for group in groups for each in group):
        operators = {each.operator for each in requirement.specifier}
        own = requirement.name == project["name"]  # an extra that has another one in it
        assert own or operators & {">=", "==", "~="}, requirement


@pytest.mark.parametrize("package", OURS)
def test_msgspec_meets_its_types_where_one_thread_runs(package: str) -> None:
    # When it meets one for the first time in two threads at once, the process ends: a decoder is
    # made at import or under a lock, and decode(..., type=...) is not used.
    strange = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted((ROOT / OURS[package] / "src").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("msgspec.msgpack.decode", "msgspec.json.decode")
        and any(keyword.arg == "type" for keyword in node.keywords)
    ]
    assert not strange
