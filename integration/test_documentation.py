"""Every code block of the site runs or is checked, and the site builds.

Python blocks of a page are one program, run as it stands, here or by the test of the package whose
page it is. Commands are looked up in the Makefile and in the commands' own options, YAML is checked
by the models, TOML is parsed. A block in a language that nobody checks fails.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable
from html.parser import HTMLParser
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import yaml
from integration.kubectl_commands import check_kubectl
from packaging.requirements import Requirement

from dataplane_core import validate_config
from grpo_trainer import TrainerConfig, load_config
from grpo_trainer.config import DEMO_CONFIG, check_config

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
READMES = [ROOT / "README.md", *sorted(ROOT.glob("*s/*/README.md"))]
"""The repository's, and each package's and service's."""
sys.path.insert(0, str(DOCS / "hooks"))
from site_pages import READMES as WITH_TEXT_OF  # noqa: E402

TEXTS = [*PAGES, *(ROOT / name for name in WITH_TEXT_OF)]
"""What the pages say: three have the text of a README."""

HERE = ("concepts", "use-one-package", "migration", "operations")
APART = ("trace-a-step", "deploy-admin", "compare")
"""They set up telemetry, of which a process has one."""
ON_RAY = ("quickstart",)
"""They start a Ray of their own, and end it."""
ADAPTER = "adapter"
ELSEWHERE = {
    "column-io": "packages/column-io/tests/test_readme.py",
    "dataplane-core": "packages/dataplane-core/tests/test_documentation.py",
    "dataplane-tq": "packages/dataplane-tq/tests/test_documentation.py",
    "refit-mx": "packages/refit-mx/tests/test_readme.py",
    "tracing": "integration/test_tracing_guide.py",
    "trainer": "services/trainer/tests/test_readme.py",
}
"""Page to the test that runs its Python blocks."""

APPS = {
    "dataplane-admin": "dataplane_admin.cli:app",
    "grpo-trace": "grpo_trainer.trace_cli:app",
    "grpo-trainer": "grpo_trainer.cli:app",
    "refit-server": "refit_server.cli:app",
}
ENTRY_POINTS = {"dataplane_core.clients", "dataplane_core.middleware", "refit_mx.compile_passes"}

NAMES = {}
"""Folder of ours to the name of its distribution."""
PROJECTS = {}
for found in sorted(ROOT.glob("*s/*/pyproject.toml")):
    declared = tomllib.loads(found.read_text())["project"]
    NAMES[found.parent.relative_to(ROOT).as_posix()] = declared["name"]
    PROJECTS[declared["name"]] = declared

FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    return [text for _, found, text in FENCE.findall(page.read_text()) if found == language]


def name_of(page: Path) -> str:
    page = DOCS / WITH_TEXT_OF.get(page.relative_to(ROOT).as_posix(), page)
    return page.relative_to(DOCS).as_posix().removesuffix(".md")


def program(name: str) -> str:
    return "\n".join(blocks(DOCS / f"{name}.md", "python"))


def pages_with(language: str) -> list[Any]:
    return [pytest.param(page, id=name_of(page)) for page in TEXTS if blocks(page, language)]


def test_every_block_is_in_a_language_that_is_checked() -> None:
    found = {
        (name_of(page), language)
        for page in TEXTS
        for _, language, _ in FENCE.findall(page.read_text())
    }
    assert {language for _, language in found} <= {
        "",
        "bash",
        "python",
        "py",
        "mermaid",
        "nginx",  # run by the admin service's test_pages_sub_path.py
        "toml",
        "yaml",
    }
    assert [name for name, language in found if language == "py"] == ["tracing"]
    # GitHub draws it; the site shows it as it is.
    assert [name for name, language in found if language == "mermaid"] == ["containers"]
    with_python = {name for name, language in found if language == "python"}
    assert with_python == {*HERE, *APART, *ON_RAY, ADAPTER, *ELSEWHERE}
    # What has no language is output or a drawing.
    for page in TEXTS:
        for text in blocks(page, ""):
            assert not re.search(r"^(\$|make|pip|import|from \w+ import|def) ", text, re.MULTILINE)


@pytest.mark.parametrize("name", ELSEWHERE)
def test_the_other_pages_are_run_by_the_tests_of_their_packages(name: str) -> None:
    assert f"{name}.md" in (ROOT / ELSEWHERE[name]).read_text()


@pytest.mark.parametrize("name", HERE)
def test_a_pages_program_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(program(name), f"{name}.md", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("name", ON_RAY)
def test_a_pages_program_runs_on_ray(name: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}.py").write_text(program(name))
    run_python([f"{name}.py"], tmp_path)


def test_the_programs_with_telemetry_run(tmp_path: Path) -> None:
    runner = "import sys\nfor path in sys.argv[1:]:\n"
    runner += "    exec(compile(open(path).read(), path, 'exec'), {'__name__': '__main__'})\n"
    for name in APART:
        (tmp_path / f"{name}.py").write_text(program(name))
    run_python(["-c", runner, *(f"{name}.py" for name in APART)], tmp_path)


def test_the_definitions_for_ray_are_whole() -> None:
    [text] = blocks(DOCS / "tracing.md", "py")
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, "tracing.md", "exec"), names)
    assert {"PolicyWorker", "train", "stop"} <= names.keys()


def test_the_contract_suite_passes_on_the_client_of_the_page(tmp_path: Path) -> None:
    page = DOCS / f"{ADAPTER}.md"
    client, suite = blocks(page, "python")
    [project] = [tomllib.loads(text) for text in blocks(page, "toml")]
    (tmp_path / "my_store.py").write_text(client)
    (tmp_path / "test_my_store.py").write_text(suite)
    # What installing the page's project leaves behind.
    told = tmp_path / "my_store-1.0.dist-info"
    told.mkdir()
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: my-store\nVersion: 1.0\n")
    for group, entries in project["project"]["entry-points"].items():
        lines = [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
        (told / "entry_points.txt").write_text("\n".join(lines) + "\n")
    done = run_python(["-m", "pytest", "-q", "-p", "no:cacheprovider", "."], tmp_path)
    assert re.search(r"^\d{3,} passed", done, re.MULTILINE), done
    text = page.read_text()
    written = len([line for line in client.splitlines() if line.strip()])
    assert f"in {round(written, -1)} lines" in text
    flags = import_from(client, "SqliteClient").capabilities
    for names, kept in re.findall(r"^\| (`[\w`, ]+`) \| (yes|no) \|", text, re.MULTILINE):
        for name in re.findall(r"\w+", names):
            assert getattr(flags, name) is (kept == "yes"), name


def import_from(source: str, name: str) -> Any:
    names: dict[str, Any] = {"__name__": "my_store"}
    exec(compile(source, "my_store.py", "exec"), names)
    return names[name]


def run_python(arguments: list[str], folder: Path) -> str:
    """The output of Python, which has to end well."""
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
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
        found = yaml.safe_load(text)
        assert set(found) <= set(TrainerConfig.model_fields), text
        if "data_plane" in found:
            validate_config(found.pop("data_plane"))
        whole = yaml.safe_load(DEMO_CONFIG.read_text())
        for section, keys in found.items():
            whole[section] = {**whole[section], **keys}
        check_config(whole, source=name_of(page))


@pytest.mark.parametrize("page", pages_with("toml"))
def test_toml_names_entry_points_that_there_are(page: Path) -> None:
    for text in blocks(page, "toml"):
        assert set(tomllib.loads(text)["project"]["entry-points"]) <= ENTRY_POINTS


@pytest.mark.parametrize("page", pages_with("bash"))
def test_commands_are_there_and_take_their_options(page: Path) -> None:
    COPIES.clear()
    lines = "".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
    for line in lines:
        for words in piped(line):
            while words and re.fullmatch(r"\w+=.*", words[0]):
                check_variable(words.pop(0).split("=")[0])
            if words:
                command = Path(words[0]).name
                assert command in COMMANDS, f"{name_of(page)}: {line}"
                COMMANDS[command](words)


def piped(line: str) -> list[list[str]]:
    """The words of each command of a line."""
    joined = [
        (last, list(words)) for last, words in groupby(shlex.split(line, comments=True), "|".__eq__)
    ]
    return [words for last, words in joined if not last]


def check_variable(name: str) -> None:
    known = "".join((DOCS / f"{page}.md").read_text() for page in ("tracing", "configuration"))
    assert f"`{name}`" in known or name == "VLLM_SERVER_DEV_MODE", name


def check_export(words: list[str]) -> None:
    for word in words[1:]:
        check_variable(word.split("=")[0])


def check_make(words: list[str]) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(words[1:]) <= set(targets), words


def check_pip(words: list[str]) -> None:
    """Folders and extras are there, and so is all of ours that pip would look for on an index."""
    assert words[1] == "install"
    matches = [re.fullmatch(r"\./([^\[]+)(.*)", word) for word in words[2:]]
    asked = [Requirement(f"{NAMES[match[1]]}{match[2]}") for match in matches if match]
    assert len(asked) == len(matches), words
    given = {each.name for each in asked}
    while asked:
        each = asked.pop()
        extras = PROJECTS[each.name].get("optional-dependencies", {})
        assert each.extras <= extras.keys(), each
        needed = sum((extras[extra] for extra in each.extras), PROJECTS[each.name]["dependencies"])
        ours = [one for one in map(Requirement, needed) if one.name in PROJECTS]
        assert {one.name for one in ours} <= given, f"{each} needs {', '.join(map(str, ours))}"
        asked += ours


@pytest.mark.parametrize("page", READMES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_a_readme_installs_with_pip_is_whole(page: Path) -> None:
    fenced = "\n".join(text for _, _, text in FENCE.findall(page.read_text()))
    for line in re.findall(r"^pip .*", fenced.replace("\\\n", " "), re.MULTILINE):
        check_pip(shlex.split(line, comments=True))


@pytest.mark.parametrize("page", READMES[1:], ids=lambda page: page.parent.name)
def test_a_readmes_table_of_dependencies_is_what_is_declared(page: Path) -> None:
    text = page.read_text().split("## Depends on\n")[1].split("\n## ")[0]
    listed: dict[str, set[str]] = {}
    for cell in re.findall(r"^\| ([\w, `-]+) \|", text, re.MULTILINE)[1:]:
        names, _, extra = cell.partition(", extra ")
        listed.setdefault(extra.strip("`"), set()).update(names.lower().split(", "))
    project = PROJECTS[NAMES[page.parent.relative_to(ROOT).as_posix()]]
    declared = {"": project["dependencies"], **project.get("optional-dependencies", {})}
    assert listed == {
        extra: {Requirement(each).name.lower() for each in needed}
        for extra, needed in declared.items()
    }


def check_files(words: list[str]) -> None:
    """Those that are named are there."""
    for word in words[1:]:
        if re.match(r"(packages|services|integration|docker)/", word):
            assert (ROOT / word).exists(), word


COPIES: dict[str, str] = {}
"""What a page has copied so far: from where, by where to."""


def check_cp(words: list[str]) -> None:
    *options, old, new = words[1:]
    assert options in ([], ["-r"]), words
    assert (ROOT / old).exists(), old
    COPIES[new] = old


def check_rm(words: list[str]) -> None:
    """What docker/secrets makes."""
    for word in words[1:]:
        folder, _, name = word.rpartition("/")
        assert folder == "docker/secrets.d", words
        assert re.search(rf"\b{name}\b", (ROOT / "docker" / "secrets").read_text()), words


def check_cd(words: list[str]) -> None:
    assert words[1:] in (["docker/secrets.d"], ["../.."]), words


def check_secrets(words: list[str]) -> None:
    assert words == ["docker/secrets"]
    assert os.access(ROOT / words[0], os.X_OK)


def check_python(words: list[str]) -> None:
    check_files(words)
    if "integration.benchmarks" in words:
        assert (ROOT / "integration" / "benchmarks" / "__main__.py").exists()


def check_curl(words: list[str]) -> None:
    from dataplane_admin import Settings, create_app

    [url] = [word for word in words if word.startswith("http")]
    with tempfile.TemporaryDirectory() as folder:
        app = create_app(Settings(store_url=f"sqlite:///{folder}/admin.sqlite"))
        app.state.store.close()
    served = {getattr(route, "path", "") for route in app.routes} | set(app.openapi()["paths"])
    assert re.sub(r"^https?://[^/]+|\?.*", "", url) in served, url


def check_app(words: list[str]) -> None:
    """A command line of ours: its subcommand, its options and the keys that it sets are there."""
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


def check_nothing(words: list[str]) -> None:
    """Somebody else's command, without a path of ours."""


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    **dict.fromkeys(APPS, check_app),
    **dict.fromkeys(("openssl", "ssh", "vllm"), check_nothing),
    "cd": check_cd,
    "cp": check_cp,
    "curl": check_curl,
    "docker": check_files,
    "export": check_export,
    "kubectl": lambda words: check_kubectl(words, COPIES),
    "make": check_make,
    "pip": check_pip,
    "python": check_python,
    "rm": check_rm,
    "secrets": check_secrets,
    "towncrier": check_files,
}


class Loads(HTMLParser):
    """What a browser fetches for a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        fetched = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src"}
        value = dict(attrs).get(fetched.get(tag, ""))
        if value:
            self.found.add(value)


def test_the_site_builds_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
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
        assert not [each for each in loads.found if re.match(r"\w+:|//", each)], page
        assert "<!-- generated" not in html
        assert 'class="mermaid"' not in html  # the theme would fetch a script for it
        for module in re.findall(
            r"^<!-- generated: api (\S+) -->$", page.read_text(), re.MULTILINE
        ):
            described = set(re.findall(rf'id="{re.escape(module)}\.(\w+)"', html))
            assert described >= set(import_module(module).__all__), module
    for readme, name in WITH_TEXT_OF.items():
        html = (site / name).with_suffix(".html").read_text()
        for heading in re.findall(r"^## (.+)$", (ROOT / readme).read_text(), re.MULTILINE):
            assert f">{heading}<" in html, readme
    for image in (DOCS / "images").glob("*.svg"):
        text = image.read_text()
        assert f'<title id="{image.stem}-title">' in text
        assert f'aria-labelledby="{image.stem}-title {image.stem}-desc"' in text
