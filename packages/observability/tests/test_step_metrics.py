"""Metrics of a step are exported once, in bounded memory, and also at the end of a process."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from setup_processes import collector, run_script, status, step_points

from observability import record_step_metrics

IMPORTS = "from observability import record_step_metrics\n"


def test_metrics_of_a_step_arrive_when_the_process_ends_at_once() -> None:
    with collector(status(200)) as server:
        result = run_script(
            f"{IMPORTS}setup('svc', run_id='r', endpoint=ENDPOINT)\n"
            "record_step_metrics(7, {'rl.loss': 0.5, 'rl.kl': 0.25}, components={'format': 1.0})",
            server.endpoint,
        )
        assert result.exit_code == 0
        assert sorted(step_points(server)) == [
            ("rl.kl", "{nat}", 0.25, {"rl.step": 7}),
            ("rl.loss", "1", 0.5, {"rl.step": 7}),
            ("rl.reward.component", "1", 1.0, {"rl.step": 7, "rl.component": "format"}),
        ]


def test_metrics_of_a_step_arrive_when_the_process_is_terminated() -> None:
    with collector(status(200)) as server:
        result = run_script(
            f"{IMPORTS}setup('svc', endpoint=ENDPOINT)\n"
            "record_step_metrics(1, {'rl.loss': 0.5})\nos.kill(os.getpid(), signal.SIGTERM)",
            server.endpoint,
        )
        assert result.exit_code == -15
        assert [name for name, *_ in step_points(server)] == ["rl.loss"]


def test_long_run_exports_each_point_once_in_bounded_memory() -> None:
    script = f"""{IMPORTS}
import gc
telemetry = setup("svc", endpoint=ENDPOINT, export_interval_s=3600)
def objects():
    gc.collect()
    return len(gc.get_objects())
counts = []
for step in range(10_000):
    record_step_metrics(step, {{f"rl.m{{number}}": step for number in range(5)}})
    if step % 500 == 499:
        assert telemetry.flush(20)
        counts.append(objects())
report(growth=counts[-1] - counts[1], counts=telemetry.counts())
"""
    with collector(status(200)) as server:
        [facts] = run_script(script, server.endpoint).reports
        exported = Counter((name, int(value)) for name, _, value, _ in step_points(server))
    assert len(exported) == 50_000
    assert set(exported.values()) == {1}
    # If attributes were retained, there would be 45,000 sets of them, each of several objects.
    assert facts["growth"] < 1_000
    assert facts["counts"]["steps"]["exported"] == 20


def test_step_metrics_survive_a_collector_outage(tmp_path: Path) -> None:
    restarted = tmp_path / "restarted"
    script = f"""{IMPORTS}
telemetry = setup("svc", endpoint=ENDPOINT, export_interval_s=3600)
record_step_metrics(0, {{"rl.loss": 0.5}})
sent_in_outage = telemetry.flush(20)
open({str(restarted)!r}, "x").close()
record_step_metrics(1, {{"rl.loss": 0.5}})
sent_later = telemetry.flush(20)
report(in_outage=sent_in_outage, later=sent_later, **telemetry.counts()["steps"])
"""
    with collector(lambda handler: status(200 if restarted.exists() else 503)(handler)) as server:
        [facts] = run_script(script, server.endpoint).reports
    assert (facts["in_outage"], facts["later"]) == (False, True)
    assert (facts["recorded"], facts["exported"], facts["dropped"]) == (2, 2, 0)


def test_a_step_without_metrics_is_not_exported() -> None:
    with collector(status(200)) as server:
        script = "telemetry = setup('svc', endpoint=ENDPOINT)\ntelemetry.shutdown()\n"
        [facts] = run_script(
            f"{script}report(**telemetry.counts()['steps'])", server.endpoint
        ).reports
    assert facts["recorded"] == 0


@pytest.mark.parametrize(
    ("name", "exported"),
    [
        ("val-core/gsm8k/reward/mean@4", "val-core/gsm8k/reward/mean_4"),
        ("7", "m7"),
        ("größe", "gr__e"),
    ],
)
def test_invalid_characters_of_a_name_are_replaced(name: str, exported: str) -> None:
    with collector(status(200)) as server:
        run_script(
            f"{IMPORTS}setup('svc', endpoint=ENDPOINT)\n"
            f"record_step_metrics(0, {json.dumps({name: 1})})",
            server.endpoint,
        )
        assert [name for name, *_ in step_points(server)] == [exported]


def test_long_names_with_the_same_beginning_stay_different() -> None:
    names = {f"{'x' * 300}{end}": 1 for end in "ab"}
    with collector(status(200)) as server:
        run_script(
            f"{IMPORTS}setup('svc', endpoint=ENDPOINT)\n"
            f"record_step_metrics(0, {json.dumps(names)})",
            server.endpoint,
        )
        exported = {name for name, *_ in step_points(server)}
    assert len(exported) == 2
    assert {(len(name), name[:200]) for name in exported} == {(255, "x" * 200)}


def test_values_that_are_not_numbers_are_skipped() -> None:
    with collector(status(200)) as server:
        run_script(
            f"{IMPORTS}setup('svc', endpoint=ENDPOINT)\n"
            "record_step_metrics(0, {'a': 'text', 'b': None, 'c': [1, 2], 'd': True, 'e': '3'},"
            " names={'d': 'rl.loss'}, run_id='r')",
            server.endpoint,
        )
        assert list(step_points(server)) == [
            ("rl.loss", "1", 1.0, {"rl.step": 0, "rl.run_id": "r"})
        ]


def test_a_value_that_is_not_finite_is_named() -> None:
    with collector(status(200)) as server:
        run_script(
            f"{IMPORTS}setup('svc', endpoint=ENDPOINT)\n"
            "record_step_metrics(3, {'a': float('nan'), 'b': float('inf')},"
            " names={'a': 'rl.kl'}, components={'c': float('nan')})",
            server.endpoint,
        )
        points = {
            (name, value, attributes.get("rl.metric"), attributes.get("rl.component"))
            for name, _, value, attributes in step_points(server)
        }
    assert points == {
        ("rl.not_finite", 1.0, "rl.kl", None),
        ("rl.not_finite", 1.0, "b", None),
        ("rl.not_finite", 1.0, "rl.reward.component", "c"),
    }


def test_without_an_sdk_nothing_is_recorded() -> None:
    record_step_metrics(0, {"rl.loss": 0.5})


def test_prometheus_has_no_series_per_step() -> None:
    result = run_script(
        f"""{IMPORTS}
import urllib.request
telemetry = setup("svc", prometheus_port=0)
record_step_metrics(0, {{"rl.loss": 0.5}})
host, port = telemetry.prometheus_address
page = urllib.request.urlopen(f"http://{{host}}:{{port}}/metrics", timeout=20).read().decode()
report(steps=page.count("rl_loss"))
"""
    )
    assert result.reports == [{"steps": 0}]
