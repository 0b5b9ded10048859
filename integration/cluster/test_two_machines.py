"""A run on two machines: it trains, fails fast when a link or machine is lost, and resumes.

Machines are namespaces of this one; see `integration.cluster.machines`.
"""

from __future__ import annotations

import json
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from integration.cluster import crossing
from integration.cluster.machines import Machines
from integration.cluster.ray_nodes import RayNodes

ROOT = Path(__file__).parents[2]
PROGRAM = str(Path(sys.executable).with_name("grpo-trainer"))
MAX_FAILURE_S = 30.0
"""Bound from the loss of a machine to the end of its run. Ray takes about twelve seconds to notice
the loss; the rest is for stopping the run on a busy machine."""
STEPS = 6
ADMIN = str(Path(sys.executable).with_name("dataplane-admin"))
ADMIN_TOKEN = secrets.token_hex(32)
RUN = (
    "cluster.placement.policy={rank: 1}",  # one on each machine
    "cluster.placement.generation={right: 1}",
    "cluster.placement.rollout={right: 1}",
    "cluster.placement.environment={right: 1}",
    "data_plane.unit_resources={left: 1}",
    "data_plane.ack_timeout_ms=10000",
    "refit.host=node",
    f"grpo.num_steps={STEPS}",
    "grpo.num_prompts_per_step=4",
    "grpo.num_generations_per_prompt=8",
    "policy.global_batch_size=16",
    "policy.micro_batch_size=16",
    "validation.every_steps=0",
    "checkpointing.every_steps=1",
)
UNSHARE = shutil.which("unshare")
ALLOWED = UNSHARE is not None and not subprocess.call(
    [UNSHARE, "--net", "--mount", "--uts", "--ipc", "true"], stderr=subprocess.DEVNULL
)

pytestmark = [
    pytest.mark.long,  # `make cluster` runs them
    pytest.mark.debian("iproute2"),
    pytest.mark.skipif(
        not ALLOWED, reason="needs the capabilities CAP_SYS_ADMIN and CAP_NET_ADMIN"
    ),
]


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    with Machines("left", "right") as both:
        yield both


@pytest.fixture(scope="module")
def nodes(machines: Machines) -> Iterator[RayNodes]:
    folder = Path(tempfile.mkdtemp(prefix="tm-"))  # a short path: Ray's sockets are below it
    reports = {
        "OTEL_EXPORTER_OTLP_HEADERS": f"authorization=Bearer {ADMIN_TOKEN}",
        "OTEL_BSP_SCHEDULE_DELAY": "500",
    }
    yield RayNodes(machines, folder, environment=reports)
    machines.close()
    shutil.rmtree(folder)


class Trainer:
    """A running trainer command on the first machine."""

    def __init__(self, nodes: RayNodes, *arguments: str) -> None:
        environment = {**nodes.environment, "COLUMNS": "80"}
        self.process = nodes.head.start([PROGRAM, *arguments], env=environment)
        RUNNING.append(self.process)

    def wait_for(self, start: str) -> str:
        """Return the next line that begins with ``start``; the test's timeout bounds the wait."""
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        for line in self.process.stdout:
            if line.startswith(start):
                return line
        raise AssertionError(f"the run ended before {start!r}: {self.process.stderr.read()}")

    def end(self, timeout_s: float) -> tuple[int, str, float]:
        """Wait for its end; return its status, its standard error, and the seconds waited."""
        started = time.monotonic()
        _, errors = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, errors, time.monotonic() - started


RUNNING: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def _no_run_remains() -> Iterator[None]:
    """Kill runs after each test: they would hold resources that the next run is blocked on."""
    yield
    while RUNNING:
        process = RUNNING.pop()
        process.kill()
        process.communicate()


def start(nodes: RayNodes, output: Path, *more: str) -> tuple[Trainer, Path]:
    """Start a run; return it and its folder."""
    overrides = [f"cluster.address={nodes.address}", *RUN, *more]
    trainer = Trainer(
        nodes,
        *("train", "--output", str(output)),
        *(word for override in overrides for word in ("--set", override)),
    )
    return trainer, Path(trainer.wait_for("run folder").split()[-1])


def history(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run that do not depend on the clock."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in line.items() if name not in ("seconds", "tokens_per_s")}
        for line in lines
    ]


@pytest.fixture(scope="module")
def baseline(nodes: RayNodes, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the metrics of a run without failures."""
    trainer, folder = start(nodes, tmp_path_factory.mktemp("baseline"))
    status, errors, _ = trainer.end(200)
    assert status == 0, errors
    return history(folder)


STUCK_RUN = (ROOT / "docs" / "recipes" / "stuck-run.md").read_text()
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()
MESSAGES = [
    *re.findall(r"^\| `([^`]*: no answer from [^`]*)` \|", STUCK_RUN, re.MULTILINE),
    *re.findall(
        r"^\| `([^`]+)` \|",
        re.split("### A process died\n|\n### A call is refused", OPERATIONS)[1],
        re.MULTILINE,
    ),
]
"""Documented messages about a lost part; ``…`` stands for a variable text."""


def check_error(status: int, errors: str, seconds: float) -> None:
    """Check that a run failed in time, with one documented line that names the lost part."""
    assert status == 1
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1, errors
    assert seconds < MAX_FAILURE_S
    patterns = ["(.+)".join(map(re.escape, message.split("…"))) for message in MESSAGES]
    assert any(re.match(rf"error: {pattern}", errors) for pattern in patterns), errors


def check_resumed(nodes: RayNodes, folder: Path, expected: Sequence[dict[str, Any]]) -> None:
    """Check that a run resumes from its checkpoint and ends with the expected metrics."""
    status, errors, _ = Trainer(nodes, "resume", str(folder)).end(200)
    assert status == 0, errors
    assert history(folder) == expected


def test_bulk_data_crosses_the_link_once(nodes: RayNodes) -> None:
    done = nodes.head.run(
        [sys.executable, crossing.__file__, nodes.address, "left", "right"],
        env=nodes.environment,
        timeout_s=120,
    )
    counted = json.loads(done.splitlines()[-1])
    assert counted["read"] == counted["bulk"]
    assert counted["bulk"] < counted["put"] < 1.1 * counted["bulk"]
    assert counted["got"] < 0.05 * counted["bulk"]  # read from local memory


@pytest.mark.timeout(400)
def test_run_on_two_machines_trains(
    baseline: list[dict[str, Any]],
) -> None:
    assert [record["step"] for record in baseline] == [*range(1, STEPS + 1)]
    assert all(record["reward"] is not None for record in baseline)


@pytest.mark.timeout(600)
def test_run_with_a_cut_link_fails_and_resumes(
    machines: Machines, nodes: RayNodes, baseline: list[dict[str, Any]], tmp_path: Path
) -> None:
    trainer, folder = start(nodes, tmp_path)
    trainer.wait_for("step    2")
    with machines.without("right"):
        status, errors, seconds = trainer.end(120)
    check_error(status, errors, seconds)
    nodes.rejoin(machines["right"])
    check_resumed(nodes, folder, baseline)


@pytest.mark.timeout(600)
def test_run_survives_a_link_cut_for_a_second(
    machines: Machines, nodes: RayNodes, baseline: list[dict[str, Any]], tmp_path: Path
) -> None:
    trainer, folder = start(nodes, tmp_path)
    trainer.wait_for("step    2")
    with machines.without("right"):
        time.sleep(1.0)  # the tested outage, shorter than Ray's health-check limit
    status, errors, _ = trainer.end(120)
    assert status == 0, errors
    assert history(folder) == baseline


@pytest.mark.timeout(600)
def test_run_with_a_dead_machine_fails_and_resumes(
    machines: Machines, nodes: RayNodes, baseline: list[dict[str, Any]], tmp_path: Path
) -> None:
    trainer, folder = start(nodes, tmp_path)
    trainer.wait_for("step    2")
    machines["right"].kill()
    status, errors, seconds = trainer.end(120)
    check_error(status, errors, seconds)
    nodes.rejoin(machines["right"])
    check_resumed(nodes, folder, baseline)


@pytest.mark.timeout(600)
def test_run_with_a_dead_controller_names_it_and_resumes(
    nodes: RayNodes, baseline: list[dict[str, Any]], tmp_path: Path
) -> None:
    trainer, folder = start(nodes, tmp_path)
    trainer.wait_for("step    2")
    controllers = []
    for pid in nodes.head.processes():
        with suppress(psutil.NoSuchProcess):  # Ray may end idle workers at any time
            process = psutil.Process(pid)
            if " ".join(process.cmdline()).startswith("ray::TransferQueueController"):
                controllers.append(process)
    [controller] = controllers
    controller.kill()
    status, errors, seconds = trainer.end(120)
    check_error(status, errors, seconds)
    assert "TransferQueueController is dead" in errors
    check_resumed(nodes, folder, baseline)


ASK = """
import sys, urllib.request
token = open(sys.argv[2]).read()
request = urllib.request.Request(sys.argv[1], headers={"Authorization": f"Bearer {token}"})
print(urllib.request.urlopen(request, timeout=20).read().decode())
"""


class Admin:
    """The admin service on the first machine, protected by a token."""

    def __init__(self, nodes: RayNodes, folder: Path) -> None:
        token = folder / "token"
        token.write_text(ADMIN_TOKEN)
        token.chmod(0o600)
        self._head, self._token = nodes.head, str(token)
        command = [ADMIN, "serve", "--host", nodes.head.address, "--port", "0"]
        command += ["--db", str(folder / "admin.sqlite"), "--token-file", self._token]
        self.process = nodes.head.start(command)
        RUNNING.append(self.process)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()

    def ask(self, path: str) -> Any:
        """Return an answer of the API, requested on the service's machine."""
        return json.loads(self._head.run([sys.executable, "-c", ASK, self.url + path, self._token]))


AHEAD_S = 45


@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs the package gcc (Debian)")
def test_wrong_clock_changes_no_metrics_and_is_reported(
    machines: Machines, nodes: RayNodes, baseline: list[dict[str, Any]], tmp_path: Path
) -> None:
    admin = Admin(nodes, tmp_path)
    machines["right"].set_clock(AHEAD_S, tmp_path)
    nodes.rejoin(machines["right"])
    try:
        trainer, folder = start(
            nodes, tmp_path, "tracing.enabled=true", f"tracing.endpoint={admin.url}"
        )
        status, errors, _ = trainer.end(200)
        assert status == 0, errors
        assert history(folder) == baseline
        traces = admin.ask("/api/v1/traces?limit=100")["traces"]
        steps = [trace for trace in traces if trace["has_root"] and trace["step"] is not None]
        assert len(steps) == STEPS
        for step in steps:
            trace = admin.ask(f"/api/v1/trace?id={step['trace_id']}")
            [note] = trace["clocks"]
            match = re.fullmatch(r"the clock of host right is ([0-9.]+) s or more ahead; .*", note)
            assert match is not None, note
            assert AHEAD_S - 1 < float(match.group(1)) <= AHEAD_S
            [root] = [row for row in trace["rows"] if row["parent_id"] is None]
            assert trace["seconds"] < root["seconds"] + 1 < AHEAD_S
            for row in trace["rows"]:
                assert -0.01 < row["start_s"] < root["seconds"]
    finally:
        machines["right"].clock = {}
        nodes.rejoin(machines["right"])
