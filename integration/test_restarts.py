"""Services that restart during a run: the run continues, and no telemetry is lost."""

from __future__ import annotations

import json
import signal
import subprocess
import sysconfig
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from integration.conftest import configured
from integration.ports import address_of, hold_port
from integration.waiting import wait_until

from grpo_trainer import RunDisplay, train

SCRIPTS = Path(sysconfig.get_path("scripts"))
TIMEOUT_S = 60.0
STEPS = 5
AWAY_S = 4.0
"""Downtime, longer than refit-mx's `CONTROL_RETRY_S` and observability's `EXPORT_TIMEOUT_S`."""
SILENT_S = 12.0
"""Time of a frozen service, longer than refit-mx's timeout for one call."""


class Service:
    """A command that listens on the same port whenever it is started.

    Args:
        folder: folder of its log.
        command: words of the command, with ``{port}`` for the port.
    """

    def __init__(self, folder: Path, *command: str) -> None:
        self._holder = hold_port()
        self.address = address_of(self._holder)
        port = self.address.partition(":")[2]
        name, *words = command
        self._command = [str(SCRIPTS / name), *(word.format(port=port) for word in words)]
        self._log = folder / f"{name}.log"
        self.start()

    def start(self) -> None:
        """Start the command and wait until it listens."""
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=log)
        assert self.process.stdout is not None
        line = self.process.stdout.readline().decode()
        assert self.address in line, self._log.read_text()

    def stop(self) -> None:
        """Terminate the command as a supervisor does."""
        self.process.terminate()
        assert self.process.wait(TIMEOUT_S) == 0, self._log.read_text()

    def signal(self, number: int) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def close(self) -> None:
        """Kill the command in any state."""
        self.process.kill()
        self.process.wait()
        self._holder.close()


class Disturber(RunDisplay):
    """A display that disturbs a run when a phase of a step begins.

    Args:
        disturbances: function to call, by step and name of the phase.
    """

    def __init__(self, disturbances: dict[tuple[int, str], Callable[[], None]]) -> None:
        self.remaining = dict(disturbances)
        self._step = 1

    def phase(self, name: str) -> None:
        """See `RunDisplay.phase`."""
        if disturb := self.remaining.pop((self._step, name), None):
            disturb()

    def finished_step(self, record: dict[str, Any]) -> None:
        """See `RunDisplay.finished_step`."""
        self._step = record["step"] + 1


@dataclass
class Services:
    """The services of a run: it refits through one and reports to the other."""

    refit: Service
    admin: Service
    refit_state: Path

    def ask(self, path: str) -> Any:
        """Return an answer of the admin service."""
        with urllib.request.urlopen(f"http://{self.admin.address}{path}", timeout=20) as answer:
            return json.load(answer)


@dataclass
class Ran:
    """A run's metrics and its traces in the admin service, in the order of steps."""

    history: list[dict[str, Any]]
    traces: list[dict[str, Any]]


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    folder = tmp_path_factory.mktemp("services")
    with ExitStack() as stack:
        state = folder / "refit.sqlite"
        refit = Service(
            *(folder, "refit-server", "serve", "--address", "127.0.0.1:{port}"),
            *("--state", str(state)),
        )
        stack.callback(refit.close)
        admin = Service(
            *(folder, "dataplane-admin", "serve", "--port", "{port}"),
            *("--db", str(folder / "admin.sqlite")),
        )
        stack.callback(admin.close)
        yield Services(refit, admin, state)


def run(services: Services, folder: Path, display: RunDisplay) -> Ran:
    """Run a few small steps with both services."""
    changes = {
        "run.name": folder.name,
        "grpo.num_steps": STEPS,
        "grpo.num_prompts_per_step": 4,
        "grpo.num_generations_per_prompt": 8,
        "policy.global_batch_size": 16,
        "policy.micro_batch_size": 16,
        "refit.control": services.refit.address,
        "tracing.enabled": True,
        "tracing.endpoint": f"http://{services.admin.address}",
    }
    began_ns = time.time_ns()
    history = train(configured(folder, changes), display=display).history

    def steps() -> list[dict[str, Any]]:
        return [
            trace
            for trace in services.ask("/api/v1/traces?limit=100")["traces"]
            if trace["start_ns"] > began_ns and trace["step"] is not None and trace["has_root"]
        ]

    wait_until(lambda: len(steps()) == STEPS, TIMEOUT_S, state=steps)
    traces = steps()
    clocks = ("seconds", "tokens_per_s")
    return Ran(
        [{key: record[key] for key in record if key not in clocks} for record in history],
        [
            services.ask(f"/api/v1/trace?id={trace['trace_id']}")
            for trace in sorted(traces, key=lambda trace: trace["step"])
        ],
    )


@pytest.mark.long
def test_run_survives_restarts_of_its_services(
    cluster: None, services: Services, tmp_path: Path
) -> None:
    baseline = run(services, tmp_path / "baseline", RunDisplay())
    timers: list[threading.Timer] = []

    def later(seconds: float, recover: Callable[[], None]) -> None:
        """Recover the service in a timer: the run meanwhile continues without it."""
        timers.append(threading.Timer(seconds, recover))
        timers[-1].start()

    def restart(service: Service) -> None:
        service.stop()
        later(AWAY_S, service.start)

    def freeze(service: Service) -> None:
        service.signal(signal.SIGSTOP)
        later(SILENT_S, lambda: service.signal(signal.SIGCONT))

    def forget() -> None:
        services.refit.stop()
        services.refit_state.unlink()
        services.refit.start()

    display = Disturber(
        {
            (2, "rollout"): lambda: restart(services.admin),
            (3, "refit"): lambda: restart(services.refit),
            (4, "refit"): lambda: freeze(services.refit),
            (5, "rollout"): forget,
        }
    )
    disturbed = run(services, tmp_path / "disturbed", display)
    for timer in timers:
        timer.join()
    assert display.remaining == {}
    assert disturbed.history == baseline.history
    assert [trace["incomplete"] for trace in disturbed.traces] == [[]] * STEPS
    assert [spans_of(trace) for trace in disturbed.traces] == [
        spans_of(trace) for trace in baseline.traces
    ]


def spans_of(trace: dict[str, Any]) -> Counter[tuple[str, str]]:
    """Count a trace's spans by process and name."""
    return Counter((row["process"], row["name"]) for row in trace["rows"])
