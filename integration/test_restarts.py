"""Services that are started again in the middle of a run: it goes on, and nothing of it is lost."""

from __future__ import annotations

import json
import signal
import socket
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

from grpo_trainer import RunDisplay, train

SCRIPTS = Path(sysconfig.get_path("scripts"))
PATIENCE_S = 60.0
STEPS = 5
AWAY_S = 4.0
"""Longer than refit-mx waits unless it is told to, and than telemetry tries one request."""
SILENT_S = 12.0
"""Longer than refit-mx waits for the answer to one call."""


class Service:
    """A command that listens on one port, each time it is started.

    Args:
        folder: of its log.
        command: with ``{port}`` for the port.
    """

    def __init__(self, folder: Path, *command: str) -> None:
        # Bound and not listening, it keeps the port from everybody who does not ask for it.
        self._holder = socket.socket()
        self._holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._holder.bind(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._holder.getsockname()[1]}"
        port = self.address.partition(":")[2]
        name, *words = command
        self._command = [str(SCRIPTS / name), *(word.format(port=port) for word in words)]
        self._log = folder / f"{name}.log"
        self.start()

    def start(self) -> None:
        """Returns when it listens."""
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=log)
        assert self.process.stdout is not None
        told = self.process.stdout.readline().decode()
        assert self.address in told, self._log.read_text()

    def stop(self) -> None:
        """As a supervisor does."""
        self.process.terminate()
        assert self.process.wait(PATIENCE_S) == 0, self._log.read_text()

    def signal(self, number: int) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def close(self) -> None:
        """End it, whatever its state."""
        self.process.kill()
        self.process.wait()
        self._holder.close()


class Disturbs(RunDisplay):
    """Does something when a phase of a step begins.

    Args:
        disturbances: what is done, by step and name of the phase.
    """

    def __init__(self, disturbances: dict[tuple[int, str], Callable[[], None]]) -> None:
        self.left = dict(disturbances)
        self._step = 1

    def phase(self, name: str) -> None:
        """See `RunDisplay.phase`."""
        if disturb := self.left.pop((self._step, name), None):
            disturb()

    def finished_step(self, record: dict[str, Any]) -> None:
        """See `RunDisplay.finished_step`."""
        self._step = record["step"] + 1


@dataclass
class Services:
    """What a run needs and reports to."""

    refit: Service
    admin: Service
    refit_state: Path

    def ask(self, path: str) -> Any:
        """An answer of the admin service."""
        with urllib.request.urlopen(f"http://{self.admin.address}{path}", timeout=20) as answer:
            return json.load(answer)


@dataclass
class Ran:
    """What a run says of its steps, and what the admin service has of them, both in order."""

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
    """A small run over both services."""
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
    deadline = time.monotonic() + PATIENCE_S
    while True:
        traces = [
            one
            for one in services.ask("/api/v1/traces?limit=100")["traces"]
            if one["start_ns"] > began_ns and one["step"] is not None and one["has_root"]
        ]
        if len(traces) == STEPS:
            break
        assert time.monotonic() < deadline, f"{len(traces)} steps arrived"
        time.sleep(0.1)
    clocks = ("seconds", "tokens_per_s")
    return Ran(
        [{key: one[key] for key in one if key not in clocks} for one in history],
        [
            services.ask(f"/api/v1/trace?id={one['trace_id']}")
            for one in sorted(traces, key=lambda one: one["step"])
        ],
    )


@pytest.mark.slow
def test_a_run_goes_on_while_its_services_are_started_again_and_nothing_of_it_is_missed(
    cluster: None, services: Services, tmp_path: Path
) -> None:
    undisturbed = run(services, tmp_path / "undisturbed", RunDisplay())
    backs: list[threading.Timer] = []

    def later(seconds: float, back: Callable[[], None]) -> None:
        """The run goes on at once, and finds nobody until then."""
        backs.append(threading.Timer(seconds, back))
        backs[-1].start()

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

    display = Disturbs(
        {
            (2, "rollout"): lambda: restart(services.admin),
            (3, "refit"): lambda: restart(services.refit),
            (4, "refit"): lambda: freeze(services.refit),
            (5, "rollout"): forget,
        }
    )
    disturbed = run(services, tmp_path / "disturbed", display)
    for back in backs:
        back.join()
    assert display.left == {}
    assert disturbed.history == undisturbed.history
    assert [one["incomplete"] for one in disturbed.traces] == [[]] * STEPS
    assert [spans_of(one) for one in disturbed.traces] == [
        spans_of(one) for one in undisturbed.traces
    ]


def spans_of(trace: dict[str, Any]) -> Counter[tuple[str, str]]:
    """How many spans of each name each process told."""
    return Counter((row["process"], row["name"]) for row in trace["rows"])
