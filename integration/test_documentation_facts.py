"""What the pages of docs/ state as facts is what the code and the results have."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import time
import tomllib
from functools import cache
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from packaging.requirements import Requirement
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient
from tensordict import TensorDict

from dataplane_admin import Settings, create_app
from dataplane_core import DataPlaneConfig, InMemoryDataPlaneClient
from grpo_trainer.config import DEMO_CONFIG

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS / "hooks"))

APPS = {
    "dataplane-admin": "dataplane_admin.cli:app",
    "refit-server": "refit_server.cli:app",
}


def page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text()


def table_after(text: str, heading: str) -> list[list[str]]:
    """The cells of the first table below ``heading``, without its two head lines."""
    lines = text.split(f"\n{heading}\n")[1].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def codes(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


@cache
def texts() -> str:
    """Every text of the code, one a line; `…` is what is filled in."""
    found = []
    for path in [*ROOT.glob("packages/*/src/**/*.py"), *ROOT.glob("services/*/src/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                values = [getattr(part, "value", None) for part in node.values]
                found.append("".join(each if isinstance(each, str) else "…" for each in values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def is_said(message: str) -> bool:
    """Whether the code says each part of the message, between what is filled in.

    What is filled in can be a text itself: a frame around the reason, so parts end at ; and : too.
    """
    for part in re.split(r"\s*…\s*", message):
        pieces = [part] if part in texts() else re.split(r"[;:] ", part)
        if any(piece not in texts() for piece in pieces):
            return False
    return True


FAILURES = [
    code
    for heading in (
        "### It does not start",
        "### It stands still",
        "### A part died",
        "### It is refused",
    )
    for row in table_after(page("operations"), heading)
    for code in codes(row[0])
]


def test_the_failure_tables_are_found() -> None:
    assert len(FAILURES) > 35


@pytest.mark.parametrize("message", FAILURES)
def test_a_message_of_the_failure_table_is_one_of_the_code(message: str) -> None:
    assert is_said(message)


def default_of(name: str) -> Any:
    """The default that the name of a table stands for.

    ``section.key`` is one of demo.yaml, ``command sub --option`` an option, and
    ``module.Class.field``, ``module.Class.method(argument)`` or ``module.function(argument)`` code.
    """
    from configuration_tables import commands_of, load, options_of

    if " --" in name:
        command, sub, option = name.split()
        options = options_of(commands_of(load(APPS[command]))[sub])
        return next(each.default for each in options if option in each.names)
    if not name.startswith(("dataplane_core.", "observability.", "refit_mx.")):
        value = yaml.safe_load(DEMO_CONFIG.read_text())
        for key in name.split("."):
            value = value[key]
        return value
    path, _, argument = name.removesuffix(")").partition("(")
    module, *rest = path.split(".")
    found: Any = import_module(module)
    for each in rest:
        found = getattr(found, each)
    return inspect.signature(found).parameters[argument].default if argument else found


TIME_OUTS = [
    (row[1], row[2].strip("`"))
    for row in table_after(page("operations"), "## Time-outs")
    if row[2].startswith("`") and not row[2].startswith("`OTEL")
]


@pytest.mark.parametrize(("stated", "name"), TIME_OUTS, ids=[name for _, name in TIME_OUTS])
def test_a_time_out_is_what_the_page_says(stated: str, name: str) -> None:
    if stated.startswith("none"):
        assert name.removeprefix("data_plane.") in DataPlaneConfig.__annotations__
        return
    seconds = float(default_of(name)) / (1000 if name.endswith("_ms") else 1)
    said = re.findall(r"(\d+) s(?: in demo.yaml)?", stated)
    assert float(said[-1]) == seconds


def test_a_store_waits_as_long_as_the_page_says() -> None:
    from dataplane_tq import client, topology
    from observability._setup_settings import EXPORT_TIMEOUT_S

    rows = {row[0]: row[1] for row in table_after(page("operations"), "## Time-outs")}
    assert rows["bootstrap of the store"] == f"{topology._START_TIMEOUT_S:g} s"
    [request] = [said for what, said in rows.items() if "one request to the store" in what]
    assert request.startswith(f"{client._DEFAULT_TIMEOUT_MS / 1000:g} s")
    assert rows["one export of telemetry"] == f"{EXPORT_TIMEOUT_S:g} s"


def test_services_listen_where_the_page_says() -> None:
    rows = {row[0]: row[1:] for row in table_after(page("operations"), "## Ports")}
    host, port, _ = rows["admin service"]
    assert host.strip("`") == default_of("dataplane-admin serve --host")
    assert int(port) == default_of("dataplane-admin serve --port")
    host, port, _ = rows["refit server"]
    assert f"{host.strip('`')}:{port}" == default_of("refit-server serve --address")
    host, port, _ = rows["its metrics"]
    assert host.strip("`") == default_of("refit-server serve --metrics-host")
    assert default_of("refit-server serve --metrics-port") is None
    assert port == "off"
    host, port, _ = rows["refit's control plane in the driver"]
    assert default_of("refit.host") in host
    assert default_of("refit_mx.EmbeddedControlServer(port)") == 0
    assert default_of("refit_mx.MxV2TrainingPublisher(host)") == "127.0.0.1"


def test_floors_and_upper_bounds_are_those_of_the_distributions() -> None:
    bounded: set[str] = set()
    declared: dict[str, dict[str, str]] = {}
    for path in ROOT.glob("*s/*/pyproject.toml"):
        project = tomllib.loads(path.read_text())["project"]
        floors = declared.setdefault(project["name"], {})
        extras = project.get("optional-dependencies", {}).values()
        for one in map(Requirement, [*project["dependencies"], *chain(*extras)]):
            for specifier in one.specifier:
                if specifier.operator == ">=":
                    floors.setdefault(one.name.lower(), specifier.version)
                else:
                    bounded.add(f"{one.name}{specifier}")
    text = page("use-one-package")
    assert {code for code in codes(text.split("\n## Versions\n")[1]) if "<" in code} == bounded
    rows = table_after(text, "## Requirements and cost")
    assert {row[0] for row in rows} == declared.keys() - {"grpo-trainer"}
    for distribution, told, *_ in rows:
        for name, floor in re.findall(r"([\w-]+) ([\d.]+)(?:,|$)", told):
            assert declared[distribution][name] == floor


def test_the_admin_pages_metrics_are_those_of_a_scrape(tmp_path: Path) -> None:
    settings = Settings(store_url=f"sqlite:///{tmp_path}/admin.sqlite", poll_s=0.05)
    shown: dict[str, set[str]] = {}
    with InMemoryDataPlaneClient() as client:
        client.register_partition("train", ["x"], 1, ["train"])
        client.put_samples(["a"], "train", TensorDict({"x": torch.ones(1)}, [1]))
        app = create_app(settings, inspector=client)
        with TestClient(app, base_url="http://127.0.0.1") as asking:
            deadline = time.monotonic() + 30
            while "dataplane_task_oldest_unclaimed_seconds" not in shown:
                assert time.monotonic() < deadline
                families = text_string_to_metric_families(asking.get("/metrics").text)
                samples = [sample for family in families for sample in family.samples]
                shown = {sample.name: set(sample.labels) for sample in samples}
    listed = {
        name: set(codes(labels))
        for names, labels, _ in table_after(page("admin"), "## Metrics")
        for name in codes(names)
    }
    assert listed == shown


def test_the_configuration_page_has_every_key_and_option() -> None:
    from configuration_tables import commands_of, load, options_of
    from site_pages import expanded

    text = expanded(page("configuration"))
    assert "<class" not in text
    assert "typing." not in text
    keys = re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)

    def check(section: dict[str, Any], path: str) -> None:
        for key, value in section.items():
            if isinstance(value, dict) and value:
                assert re.search(rf"^### {re.escape(path + key)}(,|$)", text, re.MULTILINE), key
                check(value, f"{path}{key}.")
            else:
                assert key in keys, f"{path}{key}"

    demo = yaml.safe_load(DEMO_CONFIG.read_text())
    assert demo.pop("data_plane").keys() <= set(DataPlaneConfig.__annotations__) <= set(keys)
    check(demo, "")
    for app in (*APPS.values(), "grpo_trainer.cli:app", "grpo_trainer.trace_cli:app"):
        for words, command in commands_of(load(app)).items():
            assert not words or f"\n#### {words}\n" in text
            for option in options_of(command):
                assert f"`{option.names[0]}`" in text


def test_the_targets_of_the_development_page_are_those_of_make() -> None:
    targets = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
    listed = [
        name for row in table_after(page("development"), "## Targets") for name in codes(row[0])
    ]
    assert {each.removeprefix("make ") for each in listed} <= {*targets}


@pytest.mark.parametrize(
    ("name", "heading"), [("index", "## In numbers"), ("performance", "## In short")]
)
def test_figures_are_those_of_the_results(name: str, heading: str) -> None:
    results = page("results")
    for what, figure, _ in table_after(page(name), heading):
        numbers = re.findall(r"\d[\d,]*(?:\.\d+)?(?: \([\d.]+\)| %)?", figure)
        assert numbers, what
        for number in numbers:
            assert re.search(rf"(?<![\d.]){re.escape(number)}(?![\d])", results), (what, number)
