"""The start and the end of a run are exported, whether it finishes, stops or fails."""

from __future__ import annotations

from typing import Any

import pytest
from setup_processes import run_script

from observability import record_run
from observability.receiver import Receiver


def recorded(receiver: Receiver, body: str, exit_code: int = 0) -> list[tuple[str, dict[str, Any]]]:
    """Run a program and return the name and attributes of its events."""
    program = "from observability import record_run\nsetup('svc', run_id='r', endpoint=ENDPOINT)\n"
    assert run_script(program + body, receiver.endpoint).exit_code == exit_code
    return [(event.name, dict(event.attributes)) for event in receiver.snapshot().events]


def test_a_run_records_its_start_configuration_and_end(receiver: Receiver) -> None:
    config = {"lr": 1e-6, "model": {"name": "tiny", "extra": {}}, "sinks": ["a", "b"], "seed": None}
    events = recorded(receiver, f"with record_run({config}, resumed_from=40): pass")
    flat = {
        "lr": "1e-06",
        "model.name": "tiny",
        "model.extra": "{}",
        "sinks": '["a", "b"]',
        "seed": "null",
    }
    assert events == [
        (
            "run_started",
            {"rl.run_id": "r", "dataplane.resumed_from": 40, "dataplane.config": flat},
        ),
        ("run_finished", {"rl.run_id": "r"}),
    ]


@pytest.mark.parametrize(
    ("statement", "exit_code", "event", "facts"),
    [
        ("run.stop()", 0, "run_stopped", {}),
        ("sys.exit(143)", 143, "run_stopped", {}),
        (
            "raise OSError('disk full' + 'l' * 2000 + '\\nsecond')",
            0,
            "run_failed",
            {"error.type": "OSError", "dataplane.reason": "disk ful" + "l" * 492},
        ),
        (
            "raise ValueError",
            0,
            "run_failed",
            {"error.type": "ValueError", "dataplane.reason": ""},
        ),
    ],
)
def test_the_end_of_a_run_is_recorded_with_its_kind(
    receiver: Receiver, statement: str, exit_code: int, event: str, facts: dict[str, str]
) -> None:
    program = (
        "import contextlib, sys\n"
        f"with contextlib.suppress(Exception), record_run(run_id='own') as run:\n    {statement}"
    )
    events = recorded(receiver, program, exit_code)
    assert events == [
        ("run_started", {"rl.run_id": "own"}),
        (event, {"rl.run_id": "own", **facts}),
    ]


def test_a_configuration_is_recorded_in_bounded_size(receiver: Receiver) -> None:
    [(_, started), _] = recorded(
        receiver,
        "config = {f'{number:04}' + 'k' * 1000: 'v' * 10_000 for number in range(5000)}\n"
        "with record_run(config): pass",
    )
    config = started["dataplane.config"]
    assert len(config) == 1000
    assert {(len(key), len(value)) for key, value in config.items()} == {(200, 500)}


def test_a_configuration_that_is_not_json_does_not_fail_the_run(receiver: Receiver) -> None:
    [(_, started), _] = recorded(
        receiver,
        "cyclic = []\ncyclic.append(cyclic)\n"
        "with record_run({'a': [{(1, 2): 3}], 'b': cyclic, 'c': {1}, 'd': 1}): pass",
    )
    assert started["dataplane.config"] == {"a": "<list>", "b": "<list>", "c": '"{1}"', "d": "1"}


def test_without_an_sdk_a_run_is_not_recorded() -> None:
    with record_run({"a": 1}):
        pass
