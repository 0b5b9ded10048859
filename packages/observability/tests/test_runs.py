"""The start and the end of a run are recorded and arrive, however the run ends."""

from __future__ import annotations

from typing import Any

import pytest
from setup_processes import run

from observability import record_run
from observability.receiver import Receiver


def recorded(receiver: Receiver, body: str, code: int = 0) -> list[tuple[str, dict[str, Any]]]:
    """Run a program that ends at once; return name and attributes of its events."""
    program = "from observability import record_run\nsetup('svc', run_id='r', endpoint=ENDPOINT)\n"
    assert run(program + body, receiver.endpoint).code == code
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
    ("statement", "code", "end", "facts"),
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
def test_the_end_of_a_run_says_how(
    receiver: Receiver, statement: str, code: int, end: str, facts: dict[str, str]
) -> None:
    program = (
        "import contextlib, sys\n"
        f"with contextlib.suppress(Exception), record_run(run_id='own') as run:\n    {statement}"
    )
    events = recorded(receiver, program, code)
    assert events == [
        ("run_started", {"rl.run_id": "own"}),
        (end, {"rl.run_id": "own", **facts}),
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


def test_without_an_sdk_a_run_is_not_recorded() -> None:
    with record_run({"a": 1}):
        pass
