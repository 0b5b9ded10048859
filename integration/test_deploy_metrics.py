"""The services export every metric and label that the dashboards query."""

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
# Labels that a scrape adds, and those that the collector copies from a process's resource
# (resource_to_telemetry_conversion), with underscores for the dots of docs/telemetry.md.
ADDED_LABELS = {"job", "instance", "rl_run_id", "service_name", "service_instance_id", "le"}
_INTERVAL = "OTEL_METRIC_EXPORT_INTERVAL"

RUN = """
import pathlib, sys, tempfile, urllib.request
import torch
from dataplane_core import MissingDataError, build_data_plane_client
from observability import setup, step_context, record_trained
from observability.receiver import Receiver
from tensordict import TensorDict

observed = {"enabled": True, "callback": lambda event: None}
plane = {"enabled": True, "impl": "in_memory", "observability": observed}
# The ages of a sample and its weights come from the spans of its put, so spans are exported too.
with Receiver() as receiver, setup(
    "grpo.driver", endpoint=receiver.endpoint, run_id="names", prometheus_port=0
) as telemetry:
    client = build_data_plane_client(plane)
    with step_context("names", 0, weight_version=0):
        client.register_partition("train", ["ids"], 2, ["train"])
        client.put_samples(["a", "b"], "train", TensorDict({"ids": torch.ones(2, 3)}, [2]))
        meta = client.claim_meta("train", "train", ["ids"], 2)
        client.get_data(meta)
        record_trained(client, meta, field="ids")
        try:
            client.get_samples(["c"], "train", ["ids"])
        except MissingDataError:
            pass
    telemetry.flush()
    url = "http://{}:{}/metrics".format(*telemetry.prometheus_address)
    sys.stdout.write(urllib.request.urlopen(url, timeout=10).read().decode())
"""

Series = dict[str, set[str]]


def series_of(text: str) -> Series:
    """Return the labels of each series in a Prometheus exposition, by name."""
    series: Series = defaultdict(set)
    for family in text_string_to_metric_families(text):
        series.setdefault(family.name, set())
        for sample in family.samples:
            series[sample.name] |= set(sample.labels)
    return series


@pytest.fixture(scope="module")
def run() -> Series:
    """Return the series of a run's process, named by OpenTelemetry's Prometheus exporter."""
    done = subprocess.run(
        [sys.executable, "-c", RUN], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    series = series_of(done.stdout)
    # Only stores with units have this label; the one in memory has no units (docs/telemetry.md).
    series["dataplane_outstanding_bytes"] |= {"dataplane_unit"}
    return series


@pytest.fixture(scope="module")
def refit_server() -> Iterator[Series]:
    """Yield the series of a refit server after a single call."""
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
        program = (
            "import sys\nfrom refit_mx import ControlClient, VersionNotFoundError\n"
            "with ControlClient(sys.argv[1]) as control:\n"
            "    try: control.get_version('none')\n"
            "    except VersionNotFoundError: pass\n"
        )
        subprocess.run([sys.executable, "-c", program, address], check=True, timeout=60)
        with urllib.request.urlopen(url, timeout=10) as answer:  # loopback
            series = series_of(answer.read().decode())
        # No worker joined; the label is from services/refit-server's metrics.py.
        series["refit_control_workers"] |= {"role"}
        yield series
    finally:
        server.terminate()
        server.communicate(timeout=30)


@pytest.fixture(scope="module")
def admin(tmp_path_factory: pytest.TempPathFactory) -> Series:
    """Return the series of an admin service that inspects a data plane."""
    store = tmp_path_factory.mktemp("admin") / "store.sqlite"
    with InMemoryDataPlaneClient() as client:
        client.register_partition("train", ["ids"], 2, ["train"])
        client.put_samples(["a"], "train", TensorDict({"ids": torch.ones(1, 3)}, [1]))
        settings = Settings(store_url=f"sqlite:///{store}", poll_s=0.05)
        with TestClient(
            create_app(settings, inspector=client.inspector), base_url="http://127.0.0.1"
        ) as service:
            for _ in range(200):
                series = series_of(service.get("/metrics").text)
                if "dataplane_task_oldest_unclaimed_seconds" in series:
                    break
    return series


def expressions(board: Path) -> list[str]:
    """Return every query, with values for Grafana's variables."""
    content = json.loads(board.read_text())
    queries = [target["expr"] for panel in content["panels"] for target in panel.get("targets", [])]
    for variable in content["templating"]["list"]:
        [(name, label)] = re.findall(r"^label_values\((\w+), (\w+)\)$", variable["query"]["query"])
        queries.append(f"{name}{{{label}=~'.*'}}")
    filled = [query.replace("$__rate_interval", "1m") for query in queries]
    return [re.sub(r"\$\w+", ".*", query) for query in filled]


def selectors(expression: str) -> Iterator[tuple[str, set[str]]]:
    """Yield name and labels of each vector in a PromQL expression; raise if it is invalid."""

    def walk(node: object) -> Iterator[tuple[str, set[str]]]:
        if isinstance(node, promql_parser.VectorSelector):
            yield str(node.name), {matcher.name for matcher in node.matchers.matchers}
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
def test_dashboard_queries_existing_metrics(
    board: str, fixture: str, request: pytest.FixtureRequest
) -> None:
    exported: Series = request.getfixturevalue(fixture)
    queried = [
        selector
        for expression in expressions(MONITORING / "dashboards" / board)
        for selector in selectors(expression)
    ]
    assert len(queried) > 5
    for name, labels in queried:
        assert name in exported, f"{board} queries {name}"
        missing = labels - exported[name] - ADDED_LABELS
        assert not missing, f"{board}: {name} has no {missing}"


def test_alerts_use_metrics_that_exist(run: Series, refit_server: Series, admin: Series) -> None:
    exported = {**run, **refit_server, **admin, "up": set()}
    [group] = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]:
        assert rule["annotations"]["summary"]
        for name, labels in selectors(rule["expr"]):
            assert name in exported, f"{rule['alert']}: no metric {name}"
            assert labels <= exported[name] | ADDED_LABELS, rule["alert"]


def test_data_plane_dashboard_shows_every_metric_of_a_run(run: Series) -> None:
    board = MONITORING / "dashboards" / "data-plane.json"
    queried = {name for expression in expressions(board) for name, _ in selectors(expression)}
    families = {
        re.sub("_(bucket|count|sum|created|total)$", "", name)
        for name in run
        if name.startswith(("dataplane_", "messaging_", "rl_"))
    }
    assert families <= {re.sub("_(bucket|count|sum|total)$", "", name) for name in queried}


def test_single_failure_is_visible() -> None:
    """Queries of failures use no rate: such a series has no value before its first failure."""
    failure_queries = [
        query
        for board in BOARDS
        for query in expressions(board)
        if re.search(r"dropped_total|error_type!=|code!=", query)
    ]
    assert len(failure_queries) == 3
    for query in failure_queries:
        assert not re.search(r"rate\(|increase\(", query), query


def test_processes_export_metrics_during_a_short_run() -> None:
    compose = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]
    for name in ("ray-head", "ray-worker", "trainer"):
        assert compose[name]["environment"][_INTERVAL] == "10000"
    for manifest, pods in (("base/ray.yaml", 3), ("run/trainer.yaml", 1)):
        text = (ROOT / "deploy" / "kubernetes" / manifest).read_text()
        sending = text.count("name: OTEL_EXPORTER_OTLP_HEADERS")
        assert sending == pods
        assert len(re.findall(rf'name: {_INTERVAL}\n +value: "10000"', text)) == pods


def test_dashboards_have_a_source_and_no_overlapping_panels() -> None:
    assert len(BOARDS) == 3
    source = (MONITORING / "provisioning/datasources/prometheus.yaml").read_text()
    identifiers = set()
    for path in BOARDS:
        board = json.loads(path.read_text())
        identifiers.add(board["uid"])
        occupied = set()
        for panel in board["panels"]:
            assert panel["type"] == "row" or f"uid: {panel['datasource']['uid']}" in source
            at = panel["gridPos"]
            cells = {
                (x, y)
                for x in range(at["x"], at["x"] + at["w"])
                for y in range(at["y"], at["y"] + at["h"])
            }
            assert not cells & occupied, f"{path.name}: {panel['title']} overlaps another"
            assert at["x"] + at["w"] <= 24
            occupied |= cells
    assert len(identifiers) == 3
