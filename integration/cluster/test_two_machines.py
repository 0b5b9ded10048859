"""The same trainer on two machines, and what becomes of it when the link or a machine goes.

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
SOON_S = 30.0
"""A machine that is gone is told within this: Ray takes some twelve seconds to notice it, the rest
is what stopping a run takes on a machine that does other things."""
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
    pytest.mark.slow,
    pytest.mark.debian("iproute2"),
    pytest.mark.skipif(
        not ALLOWED, reason="needs the capabilities CAP_SYS_ADMIN and CAP_NET_ADMIN"
    ),
]


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    with Machines("left", "right") as made:
        yield made


@pytest.fixture(scope="module")
def nodes(machines: Machines) -> Iterator[RayNodes]:
    folder = Path(tempfile.mkdtemp(prefix="tm-"))  # a short path: Ray's sockets lie below it
    reports = {
        "OTEL_EXPORTER_OTLP_HEADERS": f"authorization=Bearer {ADMIN_TOKEN}",
        "OTEL_BSP_SCHEDULE_DELAY": "500",
    }
    yield RayNodes(machines, folder, environment=reports)
    machines.close()
    shutil.rmtree(folder)


class Trainer:
    """The trainer's command, on the first machine."""

    def __init__(self, nodes: RayNodes, *arguments: str) -> None:
        environment = {**nodes.environment, "COLUMNS": "80"}
        self.process = nodes.head.start([PROGRAM, *arguments], env=environment)
        RUNNING.append(self.process)

    def wait_for(self, start: str) -> str:
        """The next line that begins so; the test's timeout bounds the wait."""
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        for line in self.process.stdout:
            if line.startswith(start):
                return line
        raise AssertionError(f"the run ended before {start!r}: {self.process.stderr.read()}")

    def end(self, timeout_s: float) -> tuple[int, str, float]:
        """Its status, what it wrote to standard error, and how long that took."""
        started = time.monotonic()
        _, told = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, told, time.monotonic() - started


RUNNING: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def _no_run_is_left() -> Iterator[None]:
    """One that is would hold what the next test's run waits for."""
    yield
    while RUNNING:
        process = RUNNING.pop()
        process.kill()
        process.communicate()


def start(nodes: RayNodes, output: Path, *more: str) -> tuple[Trainer, Path]:
    """A run from its start, and its folder."""
    overrides = [f"cluster.address={nodes.address}", *RUN, *more]
    trainer = Trainer(
        nodes,
        *("train", "--output", str(output)),
        *(word for override in overrides for word in ("--set", override)),
    )
    return trainer, Path(trainer.wait_for("run folder").split()[-1])


def history(folder: Path) -> list[dict[str, Any]]:
    """The metrics of a run that do not depend on the clock."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in line.items() if name not in ("seconds", "tokens_per_s")}
        for line in lines
    ]


@pytest.fixture(scope="module")
def undisturbed(nodes: RayNodes, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What a run says of its steps that nothing disturbs."""
    trainer, folder = start(nodes, tmp_path_factory.mktemp("undisturbed"))
    status, told, _ = trainer.end(200)
    assert status == 0, told
    return history(folder)


GUIDE = (ROOT / "docs" / "operations.md").read_text()
MESSAGES = [
    *re.findall(r"^\| `([^`]*: no answer from [^`]*)` \|", GUIDE, re.MULTILINE),
    *re.findall(
        r"^\| `([^`]+)` \|",
        re.split("### A part died\n|\n### It is refused", GUIDE)[1],
        re.MULTILINE,
    ),
]
"""Of the tables of failures: a part is away. ``…`` stands for what differs."""


def check_error(status: int, told: str, seconds: float) -> None:
    """A run has ended soon, with one line that says which part died, as the table has it."""
    assert status == 1
    assert told.startswith("error: ")
    assert told.count("\n") == 1, told
    assert seconds < SOON_S
    said = ["(.+)".join(map(re.escape, message.split("…"))) for message in MESSAGES]
    assert any(re.match(rf"error: {one}", told) for one in said), told


def check_resumed(nodes: RayNodes, folder: Path, expected: Sequence[dict[str, Any]]) -> None:
    """A run goes on from its checkpoint, and ends as if nothing had been."""
    status, told, _ = Trainer(nodes, "resume", str(folder)).end(200)
    assert status == 0, told
    assert history(folder) == expected


def test_the_bulk_crosses_the_link_once(nodes: RayNodes) -> None:
    done = nodes.head.run(
        [sys.executable, crossing.__file__, nodes.address, "left", "right"],
        env=nodes.environment,
        timeout_s=120,
    )
    told = json.loads(done.splitlines()[-1])
    assert told["read"] == told["bulk"]
    assert told["bulk"] < told["put"] < 1.1 * told["bulk"]
    assert told["got"] < 0.05 * told["bulk"]  # from the memory of the machine itself


@pytest.mark.timeout(400)
def test_ranks_storage_and_generator_on_two_machines_train_together(
    undisturbed: list[dict[str, Any]],
) -> None:
    assert [record["step"] for record in undisturbed] == [*range(1, STEPS + 1)]
    assert all(record["reward"] is not None for record in undisturbed)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_link_that_is_cut_ends_the_run_in_an_error_and_it_goes_on_from_its_checkpoint(
    machines: Machines, nodes: RayNodes, undisturbed: list[dict[str, Any]], tmp_path: Path
) -> None:
    trainer, folder = start(nodes, tmp_path)
    trainer.wait_for("step    2")
    with machines.without("right"):
        status, told, seconds = trainer.end(120)
    check_error(status, told, seconds)
    nodes.rejoin(machines["right"])
    check_resumed(nodes, folder, undisturbed)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_link_that_is_away_for_a_moment_costs_nothing_but_time(
    machines: Machines, nodes: RayNodes, undisturbed: list[dict[str, Any]], tmp_path: Path
) -> None:
    trainer, folder = start(nodes, tmp_path)
    trainer.wait_for("step    2")
    with machines.without("right"):
        time.sleep(1.0)  # what is tested: an absence, shorter than Ray's patience
    status, told, _ = trainer.end(120)
    assert status == 0, told
    assert history(folder) == undisturbed


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_machine_that_dies_ends_the_run_in_an_error_and_it_goes_on_with_another(
    machines: Machines, nodes: RayNodes, undisturbed: list[dict[str, Any]], tmp_path: Path
) -> None:
    trainer, folder = start(nodes, tmp_path)
    trainer.wait_for("step    2")
    machines["right"].kill()
    status, told, seconds = trainer.end(120)
    check_error(status, told, seconds)
    nodes.rejoin(machines["right"])
    check_resumed(nodes, folder, undisturbed)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_controller_that_dies_ends_the_run_in_an_error_that_names_it(
    nodes: RayNodes, undisturbed: list[dict[str, Any]], tmp_path: Path
) -> None:
    trainer, folder = start(nodes, tmp_path)
    trainer.wait_for("step    2")
    found = []
    for pid in nodes.head.processes():
        with suppress(psutil.NoSuchProcess):  # Ray ends idle workers when it likes
            process = psutil.Process(pid)
            if " ".join(process.cmdline()).startswith("ray::TransferQueueController"):
                found.append(process)
    [controller] = found
    controller.kill()
    status, told, seconds = trainer.end(120)
    check_error(status, told, seconds)
    assert "TransferQueueController is dead" in told
    check_resumed(nodes, folder, undisturbed)


ASK = """
import sys, urllib.request
token = open(sys.argv[2]).read()
asked = urllib.request.Request(sys.argv[1], headers={"Authorization": f"Bearer {token}"})
print(urllib.request.urlopen(asked, timeout=20).read().decode())
"""


class Admin:
    """The admin service on the first machine, for all who have the token."""

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
        """One answer of the API, asked for on the machine."""
        return json.loads(self._head.run([sys.executable, "-c", ASK, self.url + path, self._token]))


AHEAD_S = 45


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs the package gcc (Debian)")
def test_a_clock_that_is_wrong_changes_nothing_and_traces_say_so(
    machines: Machines, nodes: RayNodes, undisturbed: list[dict[str, Any]], tmp_path: Path
) -> None:
    admin = Admin(nodes, tmp_path)
    machines["right"].set_clock(AHEAD_S, tmp_path)
    nodes.rejoin(machines["right"])
    try:
        trainer, folder = start(
            nodes, tmp_path, "tracing.enabled=true", f"tracing.endpoint={admin.url}"
        )
        status, told, _ = trainer.end(200)
        assert status == 0, told
        assert history(folder) == undisturbed
        traces = admin.ask("/api/v1/traces?limit=100")["traces"]
        steps = [one for one in traces if one["has_root"] and one["step"] is not None]
        assert len(steps) == STEPS
        for one in steps:
            trace = admin.ask(f"/api/v1/trace?id={one['trace_id']}")
            [note] = trace["clocks"]
            found = re.fullmatch(r"the clock of host right is ([0-9.]+) s or more ahead; .*", note)
            assert found is not None, note
            assert AHEAD_S - 1 < float(found.group(1)) <= AHEAD_S
            [root] = [row for row in trace["rows"] if row["parent_id"] is None]
            assert trace["seconds"] < root["seconds"] + 1 < AHEAD_S
            for row in trace["rows"]:
                assert -0.01 < row["start_s"] < root["seconds"]
    finally:
        machines["right"].clock = {}
        nodes.rejoin(machines["right"])
