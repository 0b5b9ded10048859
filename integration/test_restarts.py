"""Services that are started again in the middle of a run: it goes on, and nothing of it is lost."""

from __future__ import annotations

import json
import socket
import subprocess
import sysconfig
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from integration.conftest import configured

from grpo_trainer import RunDisplay, train

SCRIPTS = Path(sysconfig.get_path("scripts"))
PATIENCE_S = 60.0
STEPS = 4
AWAY_S = 4.0
"""Longer than refit-mx waits unless it is told to."""


class Service:
    """A command that listens on one port, each time it is started.

    Args:
        folder: of its log.
        command: with ``{port}`` for the port.
    """

    def __init__(self, folder: Path, *command: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
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

    def close(self) -> None:
        """End it, whatever its state."""
        self.process.kill()
        self.process.wait()


class Disturbs(RunDisplay):
    """Does something when a phase of a step begins, and what is left of it when the run has ended.

    Args:
        at: step and name of the phase.
        disturb: what is done.
    """

    def __init__(self, at: tuple[int, str], disturb: Callable[[], None]) -> None:
        self._at, self._disturb = at, disturb
        self._step = 1
        self.done = 0

    def phase(self, name: str) -> None:
        """See `RunDisplay.phase`."""
        if (self._step, name) == self._at:
            self._disturb()
            self.done += 1

    def finished_step(self, record: dict[str, Any]) -> None:
        """See `RunDisplay.finished_step`."""
        self._step = record["step"] + 1


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, Service]]:
    folder = tmp_path_factory.mktemp("services")
    with ExitStack() as stack:
        refit = Service(
            *(folder, "refit-server", "serve", "--address", "127.0.0.1:{port}"),
            *("--state", str(folder / "refit.sqlite")),
        )
        stack.callback(refit.close)
        admin = Service(
            *(folder, "dataplane-admin", "serve", "--port", "{port}"),
            *("--db", str(folder / "admin.sqlite")),
        )
        stack.callback(admin.close)
        yield refit, admin


def run(
    services: tuple[Service, Service], folder: Path, display: RunDisplay, *, traced: bool = False
) -> list[dict[str, Any]]:
    """A small run over a refit server; its history, but for what depends on the clock."""
    refit, admin = services
    changes = {
        "run.name": folder.name,
        "grpo.num_steps": STEPS,
        "grpo.num_prompts_per_step": 4,
        "grpo.num_generations_per_prompt": 8,
        "policy.global_batch_size": 16,
        "policy.micro_batch_size": 16,
        "refit.control": refit.address,
        "tracing.enabled": traced,
        "tracing.endpoint": f"http://{admin.address}",
    }
    history = train(configured(folder, changes), display=display).history
    clocks = ("seconds", "tokens_per_s")
    return [{key: one[key] for key in one if key not in clocks} for one in history]


@pytest.fixture(scope="module")
def undisturbed(
    cluster: None,
    services: tuple[Service, Service],
    tmp_path_factory: pytest.TempPathFactory,
) -> list[dict[str, Any]]:
    return run(services, tmp_path_factory.mktemp("undisturbed"), RunDisplay())


@pytest.mark.slow
def test_a_refit_that_begins_while_the_refit_server_is_started_again_waits_for_it(
    services: tuple[Service, Service], undisturbed: list[dict[str, Any]], tmp_path: Path
) -> None:
    refit, _ = services

    def restart() -> None:
        refit.stop()
        # The refit begins at once, and finds nobody.
        back = threading.Timer(AWAY_S, refit.start)
        back.start()
        backs.append(back)

    backs: list[threading.Timer] = []
    display = Disturbs((3, "refit"), restart)
    history = run(services, tmp_path, display)
    for back in backs:
        back.join()
    assert display.done == 1
    assert history == undisturbed


@pytest.mark.slow
def test_an_admin_service_that_is_started_again_has_the_whole_run(
    services: tuple[Service, Service], undisturbed: list[dict[str, Any]], tmp_path: Path
) -> None:
    _, admin = services

    def restart() -> None:
        admin.stop()
        admin.start()

    display = Disturbs((3, "rollout"), restart)
    assert run(services, tmp_path, display, traced=True) == undisturbed
    assert display.done == 1
    deadline = time.monotonic() + PATIENCE_S
    while True:
        traces = ask(admin, "/api/v1/traces?limit=100")["traces"]
        steps = {one["step"]: one for one in traces if one["has_root"] and one["step"] is not None}
        if len(steps) == STEPS or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    assert sorted(steps) == [*range(STEPS)]
    for one in steps.values():
        assert ask(admin, f"/api/v1/trace?id={one['trace_id']}")["incomplete"] == []
    # The same amount before and after.
    assert len({one["spans"] for number, one in steps.items() if number}) == 1


def ask(admin: Service, path: str) -> Any:
    """An answer of the admin service."""
    with urllib.request.urlopen(f"http://{admin.address}{path}", timeout=20) as answer:
        return json.load(answer)
