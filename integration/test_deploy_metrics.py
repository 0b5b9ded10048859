"""Every metric and label that the dashboards name is one that the services really show."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import sysconfig
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any  # Any: JSON

import promql_parser
import pytest
import torch
import yaml
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient
from tensordict import TensorDict

from dataplane_admin import Settings, create_app
from dataplane_core import InMemoryDataPlaneClient

ROOT = Path(__file__).parents[1]
MONITORING = ROOT / "docker" / "monitoring"
BOARDS = sorted((MONITORING / "dashboards").glob("*.json"))
# What a scrape and the resource of a process add: the collector copies the latter
# (resource_to_telemetry_conversion), in the form that docs/telemetry.md has without dots.
OF_RESOURCE = {"job", "instance", "rl_run_id", "service_name", "service_instance_id", "le"}
_INTERVAL = "OTEL_METRIC_EXPORT_INTERVAL"

RUN = """
import pathlib, sys, tempfile, urllib.request
import torch
from dataplane_core import MissingDataError, build_data_plane_client
from observability import setup, step_context, trained
from observability.receiver import Receiver
from tensordict import TensorDict

observed = {"enabled": True, "callback": lambda event: None}
plane = {"enabled": True, "impl": "in_memory", "observability": observed}
# How old a sample or its weights are is known from the spans of its put, so these are sent.
with Receiver() as receiver, setup(
    "grpo.driver", endpoint=receiver.endpoint, run_id="names", prometheus_port=0
) as telemetry:
    client = build_data_plane_client(plane)
    with step_context("names", 0, weight_version=0):
        client.register_partition("train", ["ids"], 2, ["train"])
        client.put_samples(["a", "b"], "train", TensorDict({"ids": torch.ones(2, 3)}, [2]))
        meta = client.claim_meta("train", "train", ["ids"], 2)
        client.get_data(meta)
        trained(client, meta, field="ids")
        try:
            client.get_samples(["c"], "train", ["ids"])
        except MissingDataError:
            pass
    telemetry.flush()
    url = "http://{}:{}/metrics".format(*telemetry.prometheus_address)
    sys.stdout.write(urllib.request.urlopen(url, timeout=10).read().decode())
"""

Shown = dict[str, set[str]]


def shown(text: str) -> Shown:
    """Names of series, with their labels."""
    found: Shown = defaultdict(set)
    for family in text_string_to_metric_families(text):
        found.setdefault(family.name, set())
        for sample in family.samples:
            found[sample.name] |= set(sample.labels)
    return found


@pytest.fixture(scope="module")
def run() -> Shown:
    """Of a process of a run, named as OpenTelemetry's translation to Prometheus does."""
    done = subprocess.run(
        [sys.executable, "-c", RUN], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    found = shown(done.stdout)
    # Of stores with units, which the one in memory has not: docs/telemetry.md.
    found["dataplane_outstanding_bytes"] |= {"dataplane_unit"}
    return found


@pytest.fixture(scope="module")
def refit_server() -> Iterator[Shown]:
    """Of a refit server that was asked for its version and is asked by nobody else."""
    command = str(Path(sysconfig.get_path("scripts")) / "refit-server")
    server = subprocess.Popen(
        [command, "serve", "--address", "127.0.0.1:0", "--metrics-port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        assert server.stderr is not None
        address = server.stdout.readline().strip()
        url = server.stderr.readline().rpartition(" ")[2].strip()
        asking = (
            "import sys\nfrom refit_mx import ControlClient, VersionNotFoundError\n"
            "with ControlClient(sys.argv[1]) as control:\n"
            "    try: control.get_version('none')\n"
            "    except VersionNotFoundError: pass\n"
        )
        subprocess.run([sys.executable, "-c", asking, address], check=True, timeout=60)
        with urllib.request.urlopen(url, timeout=10) as answer:  # loopback
            found = shown(answer.read().decode())
        # Nobody joined it; its labels are those of services/refit-server's metrics.py.
        found["refit_control_workers"] |= {"role"}
        yield found
    finally:
        server.terminate()
        server.communicate(timeout=30)


@pytest.fixture(scope="module")
def admin(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    """Of the admin service, looking into a data plane."""
    store = tmp_path_factory.mktemp("admin") / "store.sqlite"
    with InMemoryDataPlaneClient() as client:
        client.register_partition("train", ["ids"], 2, ["train"])
        client.put_samples(["a"], "train", TensorDict({"ids": torch.ones(1, 3)}, [1]))
        settings = Settings(store_url=f"sqlite:///{store}", poll_s=0.05)
        with TestClient(
            create_app(settings, inspector=client), base_url="http://127.0.0.1"
        ) as asking:
            for _ in range(200):
                found = shown(asking.get("/metrics").text)
                if "dataplane_task_oldest_unclaimed_seconds" in found:
                    break
    return found


def expressions(board: Path) -> list[str]:
    """Every query, with Grafana's variables filled in."""
    told = json.loads(board.read_text())
    queries = [target["expr"] for panel in told["panels"] for target in panel.get("targets", [])]
    for variable in told["templating"]["list"]:
        [(name, label)] = re.findall(r"^label_values\((\w+), (\w+)\)$", variable["query"]["query"])
        queries.append(f"{name}{{{label}=~'.*'}}")
    filled = [query.replace("$__rate_interval", "1m") for query in queries]
    return [re.sub(r"\$\w+", ".*", query) for query in filled]


def selectors(expression: str) -> Iterator[tuple[str, set[str]]]:
    """Name and labels of each vector in it. Raises if it is no PromQL."""

    def walk(node: object) -> Iterator[tuple[str, set[str]]]:
        if isinstance(node, promql_parser.VectorSelector):
            yield str(node.name), {one.name for one in node.matchers.matchers}
        elif isinstance(node, promql_parser.MatrixSelector):
            yield from walk(node.vector_selector)
        elif isinstance(node, promql_parser.AggregateExpr):
            grouped = set(node.modifier.labels) if node.modifier is not None else set()
            for name, labels in walk(node.expr):
                yield name, labels | grouped
        elif isinstance(node, promql_parser.BinaryExpr):
            yield from walk(node.lhs)
            yield from walk(node.rhs)
        elif isinstance(node, promql_parser.Call):
            for argument in node.args:
                yield from walk(argument)
        elif isinstance(node, promql_parser.ParenExpr):
            yield from walk(node.expr)

    yield from walk(promql_parser.parse(expression))


@pytest.mark.parametrize(
    ("board", "fixture"),
    [("data-plane.json", "run"), ("refit.json", "refit_server"), ("admin.json", "admin")],
)
def test_a_dashboard_asks_for_what_there_is(
    board: str, fixture: str, request: pytest.FixtureRequest
) -> None:
    there: Shown = request.getfixturevalue(fixture)
    asked = [
        found
        for expression in expressions(MONITORING / "dashboards" / board)
        for found in selectors(expression)
    ]
    assert len(asked) > 5
    for name, labels in asked:
        assert name in there, f"{board} asks for {name}"
        assert labels <= there[name] | OF_RESOURCE, f"{board}: {name} has no {labels - there[name]}"


def test_the_data_planes_dashboard_shows_every_metric_of_a_run(run: Shown) -> None:
    board = MONITORING / "dashboards" / "data-plane.json"
    asked = {name for one in expressions(board) for name, _ in selectors(one)}
    families = {
        re.sub("_(bucket|count|sum|created|total)$", "", name)
        for name in run
        if name.startswith(("dataplane_", "messaging_", "rl_"))
    }
    assert families <= {re.sub("_(bucket|count|sum|total)$", "", name) for name in asked}


def panels(board: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((MONITORING / "dashboards" / board).read_text())[
        "panels"
    ]
    return found


def test_one_failure_is_drawn() -> None:
    """What begins with the first failure has no value before it, of which a rate could be made."""
    seldom = [
        query
        for board in BOARDS
        for query in expressions(board)
        if re.search(r"dropped_total|error_type!=|code!=", query)
    ]
    assert len(seldom) == 3
    for query in seldom:
        assert not re.search(r"rate\(|increase\(", query), query


def test_panels_that_stay_empty_here_say_why() -> None:
    kinds = [(one["type"], one["title"]) for one in panels("admin.json")]
    of_live = panels("admin.json")[kinds.index(("row", "Live data plane")) + 1 :]
    assert len(of_live) == 5
    for panel in of_live:
        assert "Only with --ray-address" in panel["description"], panel["title"]
    for panel in panels("data-plane.json"):
        if "claim_age" in json.dumps(panel) or "dataplane_ready" in json.dumps(panel):
            assert "Only tasks that claim" in panel["description"], panel["title"]


def test_processes_send_metrics_before_a_short_run_is_over() -> None:
    compose = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]
    for name in ("ray-head", "ray-worker", "trainer"):
        assert compose[name]["environment"][_INTERVAL] == "10000"
    for manifest, pods in (("base/ray.yaml", 3), ("run/trainer.yaml", 1)):
        text = (ROOT / "deploy" / "kubernetes" / manifest).read_text()
        sending = text.count("name: OTEL_EXPORTER_OTLP_HEADERS")
        assert sending == pods
        assert len(re.findall(rf'name: {_INTERVAL}\n +value: "10000"', text)) == pods


def test_dashboards_have_a_source_and_places_of_their_own() -> None:
    assert len(BOARDS) == 3
    source = (MONITORING / "provisioning/datasources/prometheus.yaml").read_text()
    identifiers = set()
    for path in BOARDS:
        board = json.loads(path.read_text())
        identifiers.add(board["uid"])
        places = set()
        for panel in board["panels"]:
            assert panel["type"] == "row" or f"uid: {panel['datasource']['uid']}" in source
            at = panel["gridPos"]
            cells = {
                (x, y)
                for x in range(at["x"], at["x"] + at["w"])
                for y in range(at["y"], at["y"] + at["h"])
            }
            assert not cells & places, f"{path.name}: {panel['title']} lies on another"
            assert at["x"] + at["w"] <= 24
            places |= cells
    assert len(identifiers) == 3
