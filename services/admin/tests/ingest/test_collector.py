"""The collector's configuration for engines and nodes, with the metrics that its receivers emit.

Names and attributes are those of the receivers' documentation; the collector itself does not run.
Imports internals: the names that the service reads are compared.
"""

import re
import time
from pathlib import Path

import pytest
import yaml
from loads import NS, counters, gauges

from dataplane_admin.load_metrics import SOURCES  # the names to compare with

FILE = Path(__file__).parents[4] / "deploy/collector/engines.yaml"


@pytest.fixture(scope="module")
def configuration():
    return yaml.safe_load(FILE.read_text())


def kept(configuration, name):
    """Return whether a metric passes the filter of a scrape job."""
    jobs = configuration["receivers"]["prometheus"]["config"]["scrape_configs"]
    filters = [job["metric_relabel_configs"] for job in jobs]
    assert all(rule["action"] == "keep" for [rule] in filters)
    return any(re.fullmatch(rule["regex"], name) for [rule] in filters)


def test_pipelines_name_what_is_configured(configuration):
    for pipeline in configuration["service"]["pipelines"].values():
        for role in ("receivers", "processors", "exporters"):
            assert set(pipeline[role]) <= set(configuration[role])
    assert not any(name.startswith("batch") for name in configuration["processors"])


def test_exactly_the_metrics_of_load_are_scraped(configuration):
    for name, source in SOURCES.items():
        if not name.startswith(("system.", "hw.")):
            assert kept(configuration, f"{name}_total" if source.is_counter else name), name
    for name in ("vllm:num_requests_waiting_by_reason", "vllm:e2e_request_latency_seconds_bucket"):
        assert not kept(configuration, name)


def test_loopback_engines_are_named_by_their_node(configuration):
    [job, _] = configuration["receivers"]["prometheus"]["config"]["scrape_configs"]
    [rule] = job["relabel_configs"]
    # The collector reads $$ as $, and Prometheus $2 as a group.
    replacement = rule["replacement"].replace("${env:NODE_NAME}", "node-1").replace("$$2", r"\2")
    assert re.fullmatch(rule["regex"], "127.0.0.1:8000").expand(replacement) == "node-1:8000"
    assert re.fullmatch(rule["regex"], "node-2:8000") is None


def test_the_receivers_metrics_become_lanes(job_of):
    job, start = job_of(), time.time_ns() // NS - 30
    engine = {
        "service.name": "engines",
        "service.instance.id": "node-1:8000",
        "server.address": "127.0.0.1",
        "server.port": "8000",
        "url.scheme": "http",
    }
    labels = {"engine": "0", "model_name": "tiny"}
    for step in range(3):
        second, node = start + 5 * step, {"host.name": "node-1"}
        running = [("vllm:num_requests_running", labels, 3.0), ("up", {}, 1.0)]
        tokens = [("vllm:generation_tokens_total", labels, 500.0 * step)]
        states = {"user": 1, "system": 1, "idle": 2, "wait": 1, "interrupt": 0, "nice": 0}
        times = [
            ("system.cpu.time", {"cpu": f"cpu{cpu}", "state": state}, 10.0 + step * share)
            for cpu in range(2)
            for state, share in states.items()
        ]
        memory = {"used": 1e9, "free": 1e9, "cached": 2e9, "buffered": 0, "slab_unreclaimable": 9e9}
        points = [("system.memory.usage", {"state": name}, held) for name, held in memory.items()]
        job.send(gauges(engine, second, running), counters(engine, second, tokens))
        job.send(counters(node, second, times), gauges(node, second, points))
    shown = {
        (subject["kind"], subject["name"]): {
            series["metric"]: series["values"] for series in subject["series"]
        }
        for subject in job.get("load")["subjects"]
    }
    assert shown == {
        ("engine", "node-1:8000"): {"running": [3.0] * 3, "generation_tokens": [100.0] * 2},
        ("node", "node-1"): {"cpu": [0.4] * 2, "memory": [0.25] * 3},
    }
    assert [series["name"] for series in job.get("series")] == ["up"]
