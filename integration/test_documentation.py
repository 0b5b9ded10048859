"""Every code block of the site runs or is checked, and the site builds.

The Python blocks of a page are one program, which runs here or in the test of the page's package.
Targets of make and options of commands must exist, YAML must be a configuration, and TOML must name
known entry points. A block in an unchecked language fails.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import yaml
from integration.benchmarks.results_page import TABLES, fill
from integration.lean_ray import LEAN, LEAN_ENVIRONMENT
from jsonschema import Draft202012Validator

from dataplane_admin import AlertRules
from dataplane_core import validate_config
from grpo_trainer import DEMO_CONFIG, TrainerConfig, check_config, load_config

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
OUTSIDE = sorted(
    path for form in ("*.md", "*s/*/README.md", "deploy/**/*.md") for path in ROOT.glob(form)
)
"""Pages of the repository that the site does not build."""
sys.path.insert(0, str(DOCS / "hooks"))
from site_pages import READMES as WITH_TEXT_OF  # noqa: E402

TEXTS = [*PAGES, *(ROOT / name for name in WITH_TEXT_OF)]
"""Files with the pages' text: three pages take it from a README."""

HERE = (
    "concepts",
    "configuration",
    "migration",
    "recipes/capacity",
    "recipes/consumer-with-leases",
)
APART = ("trace-a-step", "compare")
"""Pages that set up telemetry, which a process can do only once."""
ON_RAY = ("quickstart",)
"""Pages that start and stop a separate Ray."""
ADAPTER = "adapter"
ELSEWHERE = {
    "column-io": "packages/column-io/tests/test_readme.py",
    "dataplane-core": "packages/dataplane-core/tests/test_documentation.py",
    "refit-mx": "packages/refit-mx/tests/test_readme.py",
    "rollout-actor": "integration/vllm/test_generation_page.py",
    "trainer": "services/trainer/tests/test_readme.py",
    "recipes/alerts": "services/admin/tests/test_webhooks.py",
    "recipes/nemo-rl": "integration/nemo_rl/test_nemo_rl.py",
    "recipes/refit-torchrun": "integration/vllm/test_torchrun_refit.py",
    "recipes/trace-skyrl": "integration/test_recipes.py",
    "recipes/trace-torchrun": "integration/test_recipes.py",
    "recipes/trace-trl": "integration/test_recipes.py",
    "recipes/trace-verl": "integration/test_recipes.py",
}
"""Tests that run the Python blocks of a page, by page."""

APPS = {
    "dataplane-admin": "dataplane_admin.cli:app",
    "grpo-trace": "grpo_trainer.trace_cli:app",
    "grpo-trainer": "grpo_trainer.cli:app",
    "observability": "observability.cli:app",
    "refit-server": "refit_server.cli:app",
}
ENTRY_POINTS = {"dataplane_core.clients", "dataplane_core.middleware", "refit_mx.compile_passes"}

FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    return [text for _, name, text in FENCE.findall(page.read_text()) if name == language]


def name_of(page: Path) -> str:
    page = DOCS / WITH_TEXT_OF.get(page.relative_to(ROOT).as_posix(), page)
    return page.relative_to(DOCS).as_posix().removesuffix(".md")


def program(name: str) -> str:
    return "\n".join(blocks(DOCS / f"{name}.md", "python"))


def pages_with(language: str) -> list[Any]:
    return [pytest.param(page, id=name_of(page)) for page in TEXTS if blocks(page, language)]


def test_every_block_has_a_checked_language() -> None:
    languages = {
        (name_of(page), language)
        for page in TEXTS
        for _, language, _ in FENCE.findall(page.read_text())
    }
    assert {language for _, language in languages} <= {
        "",
        "bash",
        "python",
        "py",
        "mermaid",
        "ini",  # run by test_recipes.py
        "nginx",  # run by the admin service's test_pages_sub_path.py
        "toml",
        "yaml",
    }
    assert [name for name, language in languages if language == "py"] == ["trace-a-step"]
    # GitHub renders Mermaid; the site shows its source.
    assert [name for name, language in languages if language == "mermaid"] == ["containers"]
    with_python = {name for name, language in languages if language == "python"}
    assert with_python == {*HERE, *APART, *ON_RAY, ADAPTER, *ELSEWHERE}
    # A block without a language is output or a drawing.
    for page in TEXTS:
        for text in blocks(page, ""):
            assert not re.search(r"^(\$|make|pip|import|from \w+ import|def) ", text, re.MULTILINE)


@pytest.mark.parametrize("name", ELSEWHERE)
def test_other_pages_are_run_by_their_packages_tests(name: str) -> None:
    text = (ROOT / ELSEWHERE[name]).read_text()
    assert f"{name}.md" in text or f'"{Path(name).name}"' in text


@pytest.mark.parametrize("name", HERE)
def test_program_of_a_page_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(program(name), f"{name}.md", "exec"), {"__name__": "__main__"})


DEMO = yaml.safe_load(DEMO_CONFIG.read_text())
DOCUMENTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "data-plane": (
        DEMO["data_plane"],
        {"surprise": 1, "impl": 1, "storage_capacity": 0, "packed_transport": "pigeon"},
    ),
    "packed-storage": (
        {"num_storage_units": 2, "global_segment_size": 1 << 30, "unit_resources": {"big": 1}},
        {
            "surprise": 1,
            "global_segment_size": "1 GB",
            "num_storage_units": 0,
            "packed_transport": "pigeon",
            "allow_pickle": "always",
        },
    ),
    "refit-publisher": (
        {"rpc_timeout_s": 5, "copy_threads": None},
        {"surprise": 1, "rpc_timeout_s": 0, "copy_threads": 0, "stale_on_sigterm": 2},
    ),
    "refit-receiver": ({"lease_ttl_s": 20.0}, {"surprise": 1, "scratch_copies": 1.5}),
    "refit-limits": ({"retention": 0}, {"surprise": 1, "retention": -1, "max_leases": 0}),
    "rollout-actor": (
        {**DEMO, "env": {"step_timeout_s": 60}},
        {"policy": {}, "grpo": {"max_rollout_turns": "4"}, "env": {"step_timeout_s": "60"}},
    ),
}
"""Correct documents, and values that make them wrong, by schema of the configuration page."""


def test_schemas_of_the_configuration_page_check_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(program("configuration"), "configuration.md", "exec"), {})
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{name}.schema.json" for name in DOCUMENTS
    }
    for name, (document, wrong) in DOCUMENTS.items():
        schema = Draft202012Validator(json.loads(Path(f"{name}.schema.json").read_text()))
        schema.check_schema(schema.schema)
        assert all("description" in key for key in schema.schema["properties"].values()), name
        schema.validate(document)
        for key, value in wrong.items():
            assert not schema.is_valid({**document, key: value}), (name, key)


@pytest.mark.parametrize("name", ON_RAY)
def test_program_of_a_page_runs_on_ray(name: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}.py").write_text(program(name))
    run_python([*LEAN[1:], f"{name}.py"], tmp_path)


def test_programs_with_telemetry_run(tmp_path: Path) -> None:
    runner = "import sys\nfor path in sys.argv[1:]:\n"
    runner += "    exec(compile(open(path).read(), path, 'exec'), {'__name__': '__main__'})\n"
    for name in APART:
        (tmp_path / f"{name}.py").write_text(program(name))
    run_python(["-c", runner, *(f"{name}.py" for name in APART)], tmp_path)


def test_definitions_for_ray_are_complete() -> None:
    [text] = blocks(DOCS / "trace-a-step.md", "py")
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, "trace-a-step.md", "exec"), names)
    assert {"PolicyWorker", "train", "stop"} <= names.keys()


def test_contract_suite_passes_on_the_pages_client(tmp_path: Path) -> None:
    page = DOCS / f"{ADAPTER}.md"
    client, suite = blocks(page, "python")
    [project] = [tomllib.loads(text) for text in blocks(page, "toml")]
    (tmp_path / "my_store.py").write_text(client)
    (tmp_path / "test_my_store.py").write_text(suite)
    # The metadata that an installation of the page's project would have.
    metadata = tmp_path / "my_store-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my-store\nVersion: 1.0\n")
    for group, entries in project["project"]["entry-points"].items():
        lines = [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
        (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    done = run_python(["-m", "pytest", "-q", "-p", "no:cacheprovider", "."], tmp_path)
    assert re.search(r"^\d{3,} passed", done, re.MULTILINE), done


def run_python(arguments: list[str], folder: Path) -> str:
    """Run Python in ``folder``, check its status, and return its output."""
    path = os.pathsep.join([str(folder), LEAN_ENVIRONMENT["PYTHONPATH"]])
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("page", pages_with("yaml"))
def test_yaml_is_a_configuration(page: Path) -> None:
    for text in blocks(page, "yaml"):
        sections = yaml.safe_load(text)
        if set(sections) <= set(AlertRules.model_fields):
            AlertRules.model_validate(sections)
            continue
        if "services" in sections:  # a compose file, which test_deploy_images.py checks
            continue
        assert set(sections) <= set(TrainerConfig.model_fields), text
        if "data_plane" in sections:
            validate_config(sections.pop("data_plane"))
        config = yaml.safe_load(DEMO_CONFIG.read_text())
        for section, keys in sections.items():
            config[section] = {**config[section], **keys}
        check_config(config, source=name_of(page))


@pytest.mark.parametrize("page", pages_with("toml"))
def test_toml_names_known_entry_points(page: Path) -> None:
    for text in blocks(page, "toml"):
        tables = tomllib.loads(text)
        assert set(tables) <= {"project", "tool"}
        if "project" in tables:
            assert set(tables["project"]["entry-points"]) <= ENTRY_POINTS


@pytest.mark.parametrize(
    "page",
    [page for page in sorted({*TEXTS, *OUTSIDE}) if blocks(page, "bash")],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_commands_and_their_options_exist(page: Path) -> None:
    lines = "".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
    for line in lines:
        for words in piped(line):
            while words and re.fullmatch(r"\w+=.*", words[0]):
                del words[0]
            for word in words:
                check_path(word)
            if words[1:2] == ["-m"]:
                del words[:2]
            command = Path(words[0]).name if words else ""
            if command == "make":
                check_make(words)
            elif command in APPS:
                check_app(words)


@pytest.mark.parametrize("path", APPS.values(), ids=APPS)
def test_examples_of_the_help_exist(path: str) -> None:
    from configuration_tables import commands_of, load

    app = load(path)
    texts = [app.info.help, *(each.__doc__ or "" for each in commands_of(app).values())]
    examples = re.findall(r"Example: (.*)", "\n".join(texts))
    assert len(examples) == len(app.registered_commands) + 1
    for example in examples:
        words = shlex.split(example.partition(" > ")[0])
        check_app(words[2:] if words[1] == "-m" else words)


def piped(line: str) -> list[list[str]]:
    """Return the words of each command in a pipeline."""
    parts = groupby(shlex.split(line, comments=True), "|".__eq__)
    return [list(words) for last, words in parts if not last]


def check_path(word: str) -> None:
    """Check that a path of the repository exists, and the extras of a package to install."""
    match = re.fullmatch(
        r"(?:(?:\.|\$REPO)/)?((?:packages|services|integration)/[^[]+)(?:\[(.+)\])?", word
    )
    if match is None:
        return
    path = ROOT / match[1]
    assert path.exists(), word
    if match[2] is not None:
        project = tomllib.loads((path / "pyproject.toml").read_text())["project"]
        assert set(match[2].split(",")) <= set(project["optional-dependencies"]), word


def check_make(words: list[str]) -> None:
    text = (ROOT / "Makefile").read_text()
    targets = {*re.findall(r"^([a-z-]+):", text, re.MULTILINE)}
    targets |= {f"test-{folder.name}" for folder in ROOT.glob("*s/*/") if (folder / "src").exists()}
    assert {word for word in words[1:] if "=" not in word} <= targets, words


def check_app(words: list[str]) -> None:
    """Check that a command line's subcommand, options and configuration keys exist."""
    from configuration_tables import commands_of, options_of

    module, _, attribute = APPS[Path(words[0]).name].partition(":")
    commands = commands_of(getattr(import_module(module), attribute))
    options = options_of(commands[""]) if "" in commands else []
    given = words[1:]
    while given:
        word = given.pop(0)
        if word in commands:
            options = options_of(commands[word])
        elif word.startswith("-") and word != "--help":
            [option] = [each for each in options if word in each.names] or [None]
            assert option is not None, f"{words[0]} has no {word}"
            if not option.is_flag:
                value = given.pop(0)
                if word == "--set":
                    load_config(overrides=[value])
        elif word != "--help":
            assert any(each.is_argument for each in options), f"{words[0]}: {word}"


class Loads(HTMLParser):
    """A parser that collects the URLs a browser fetches for a page."""

    def __init__(self) -> None:
        super().__init__()
        self.urls: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        fetched = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src"}
        value = dict(attrs).get(fetched.get(tag, ""))
        if value:
            self.urls.add(value)


def test_site_builds_and_loads_nothing_external(tmp_path: Path) -> None:
    site = tmp_path / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", site],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for page in PAGES:
        html = (site / f"{name_of(page)}.html").read_text()
        loads = Loads()
        loads.feed(html)
        assert not [each for each in loads.urls if re.match(r"\w+:|//", each)], page
        assert "<!-- generated" not in html


@pytest.mark.parametrize("page", OUTSIDE, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_outside_the_site_resolve(page: Path) -> None:
    text = FENCE.sub("", page.read_text())
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
    broken = [link for link in links if ":" not in link and not (page.parent / link).exists()]
    assert not broken


def test_figures_match_the_results() -> None:
    results = (DOCS / "results.md").read_text()
    table = (ROOT / "README.md").read_text().split("\n## Measured\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| [^|]+ \| ([^|]+) \|", table, re.MULTILINE)[1:]
    assert rows
    for number in re.findall(r"\d[\d,]*(?:\.\d+)?(?: \([\d.]+\)| %)?", "\n".join(rows)):
        assert re.search(rf"(?<![\d.]){re.escape(number)}(?![\d])", results), number


def test_the_benchmark_fills_the_tables_of_the_results() -> None:
    page = (DOCS / "results.md").read_text()
    assert fill(page, []) == page
    for title, rows in TABLES.items():
        for label, cells in rows.items():
            names = {name for cell in cells for name in cell.names}
            filled = fill(page, [{"name": name, "value": 0.1239, "spread": 1} for name in names])
            table = filled[filled.index(f"\n| {title} |") :].split("\n\n")[0]
            [row] = re.findall(rf"^\| {re.escape(label)} \|(.*) \|$", table, re.MULTILINE)
            assert ["0.12" in cell for cell in row.split("|")][: len(cells)] == [
                bool(cell.names) for cell in cells
            ]


VLLM = "integration/vllm"
VLLM_ON_A_GPU = f"{VLLM}/test_engine_gpu.py"
MODELEXPRESS = "packages/refit-mx/tests/test_modelexpress_clients.py"
SUITE_OF_VERL = "integration/verl/test_upstream_suite.py"
COUNTED = (
    (
        "verl",
        "CI",
        ".venv-verl",
        ["-m", "not long", f"--ignore={SUITE_OF_VERL}", "integration/verl"],
    ),
    ("verl", "nightly", ".venv-verl", ["-m", "long", "integration/verl"]),
    ("NeMo-RL", "CI", ".venv", ["-m", "not long", "integration/nemo_rl"]),
    ("SkyRL", "nightly", ".venv", ["-m", "long", "integration/test_skyrl.py"]),
    ("TRL", "CI", ".venv", ["-m", "not long", "integration/test_trl.py"]),
    ("RL-Insight", "CI", ".venv", ["packages/observability/tests/test_rl_insight.py"]),
    ("vLLM", "CI", ".venv-vllm", ["-m", "not long", f"--ignore={VLLM_ON_A_GPU}", VLLM]),
    ("vLLM", "with a GPU", ".venv-vllm", [VLLM_ON_A_GPU]),
    ("vLLM", "nightly", ".venv", ["packages/refit-mx/tests/test_vllm_versions.py"]),
    ("modelexpress", "CI", ".venv", ["-m", "not long", MODELEXPRESS]),
    ("modelexpress", "nightly", ".venv", ["-m", "long", MODELEXPRESS]),
)
"""Counts in the comparison: project, when its tests run, their environment, and their selection."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("project", "when", "environment", "selection"),
    COUNTED,
    ids=[f"{project}, {when}" for project, when, *_ in COUNTED],
)
def test_comparison_counts_the_tests_of_peers(
    project: str, when: str, environment: str, selection: list[str]
) -> None:
    separate = environment != ".venv"
    python = ROOT / environment / "bin/python" if separate else Path(sys.executable)
    if not python.exists():
        target = environment.removeprefix(".venv-")
        pytest.skip(f"needs the package {project.lower()}, which `make {target}` installs")
    command = [python, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    confined = [f"--confcutdir=integration/{project.lower()}"] if separate else []
    collected = subprocess.run(
        [*command, *confined, *selection], cwd=ROOT, check=True, capture_output=True, text=True
    )
    tests = re.findall(r"^\S+\.py::", collected.stdout, re.MULTILINE)
    row = re.search(rf"^\| {project} \|.*$", (DOCS / "compare.md").read_text(), re.MULTILINE)
    assert row is not None
    stated = re.search(rf"\b{when}: (\d+) ", row[0], re.IGNORECASE)
    assert stated is not None
    assert len(tests) == int(stated[1])


@pytest.mark.parametrize(
    ("project", "suite"),
    [
        ("verl", SUITE_OF_VERL),
        ("TransferQueue", "packages/dataplane-tq/tests/test_upstream_suite.py"),
    ],
)
def test_comparison_counts_the_tests_of_peers_wheels(project: str, suite: str) -> None:
    counts = runpy.run_path(str(ROOT / suite))
    passed = counts["TESTS"] - len(counts.get("EXCEPTIONS", ()))
    page = (DOCS / "compare.md").read_text()
    assert re.search(
        rf"^\| {project} \|.*\| {passed} of {counts['TESTS']} pass", page, re.MULTILINE
    )


def test_subpackages_are_those_that_lint_checks() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = settings["tool"]["importlinter"]["contracts"]
    layered = [contract for contract in contracts if "containers" in contract]
    pictures = ["\n  ".join([*layers["containers"], *layers["layers"]]) for layers in layered]
    page = DOCS / "decisions" / "subpackages.md"
    assert blocks(page, "") == [f"{picture}\n" for picture in pictures]
