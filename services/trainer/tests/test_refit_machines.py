"""Addresses on which the processes of a refit listen, and that they advertise, on two machines.

The machines are two nodes of a real Ray with addresses of the loopback interface. Workers
that have only their side of the refit take the place of a run's workers. So internals are imported.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import pytest
import ray
import torch
from integration.ports import hold_port
from ray.cluster_utils import Cluster

from grpo_trainer.actors import address
from grpo_trainer.actors.address import is_loopback, resolve_hosts
from grpo_trainer.actors.calls import ActorCalls
from grpo_trainer.config.sections import RefitSection
from grpo_trainer.errors import WorkerError
from grpo_trainer.refit.source import RefitSource
from grpo_trainer.refit.target import RefitTarget
from grpo_trainer.refit.weight_sync import RefitWeightSync
from refit_mx import EmbeddedControlServer

DRIVER, OTHER = "127.0.0.2", "127.0.0.3"
SHAPE = (6, 4)


@pytest.mark.parametrize(
    ("host", "advertised", "expected"),
    [
        ("127.0.0.1", None, ("127.0.0.1", "127.0.0.1")),
        ("10.0.0.1", None, ("10.0.0.1", "10.0.0.1")),
        ("node", None, ("10.9.9.9", "10.9.9.9")),
        ("0.0.0.0", None, ("0.0.0.0", "10.9.9.9")),
        ("::", None, ("::", "10.9.9.9")),
        ("0.0.0.0", "pod-7.example", ("0.0.0.0", "pod-7.example")),
        ("10.0.0.1", "node", ("10.0.0.1", "10.9.9.9")),
    ],
)
def test_resolved_hosts_to_listen_on_and_to_advertise(monkeypatch, host, advertised, expected):
    monkeypatch.setattr(address.ray.util, "get_node_ip_address", lambda: "10.9.9.9")
    assert resolve_hosts(host, advertised) == expected


def test_the_shipped_demo_listens_on_loopback_alone(configure):
    refit = configure().refit
    assert all(is_loopback(each) for each in resolve_hosts(refit.host, refit.advertised_host))


def weights(version):
    return torch.arange(24.0).view(SHAPE) + version


class Worker:
    """Policy or generation worker that has only the refit."""

    def __init__(self, rank, world):
        self.rank, self.world = rank, world
        self.weights = {"w": torch.zeros(SHAPE)}

    def node_address(self):
        return address.node_address()

    def join_refit(self, settings):
        if self.rank is None:
            self.refit = RefitTarget(settings, self.weights)
        else:
            self.refit = RefitSource(settings, rank=self.rank, world=self.world)

    def publish_weights(self, version_id, carrier=None):
        self.refit.publish(version_id, {"w": weights(int(version_id.split("-")[-2]))})

    def install_weights(self, version_id, carrier=None):
        self.refit.refit(version_id)

    def state(self):
        return self.weights["w"]

    def endpoint(self):
        return self.refit._publisher._server.endpoint


@pytest.fixture(scope="module")
def machines():
    """Ray cluster of two nodes, with the driver on the first."""
    if sys.platform != "linux":
        pytest.skip("needs Linux, whose loopback interface has all of 127.0.0.0/8")
    folder = tempfile.mkdtemp(prefix="gt-")
    # Ray writes the head node's address below this folder, into `ray`, which it does not create.
    patch = pytest.MonkeyPatch()
    patch.setenv("RAY_TMPDIR", folder)
    Path(folder, "ray").mkdir()
    nodes = {"num_cpus": 2, "include_dashboard": False}
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            **nodes,
            "node_ip_address": DRIVER,
            "temp_dir": folder,
            "resources": {"driver": 1},
        },
    )
    cluster.add_node(**nodes, node_ip_address=OTHER, resources={"other": 1})
    ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
    yield
    ray.shutdown()
    cluster.shutdown()
    patch.undo()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def calls(machines):
    """Calls to a source on each machine, and a target on the second."""
    calls = ActorCalls(timeout_s=60)
    for name, where, arguments in (
        ("source 0", "driver", (0, 2)),
        ("source 1", "other", (1, 2)),
        ("target", "other", (None, 2)),
    ):
        actor = ray.remote(Worker).options(num_cpus=0.1, resources={where: 0.1})
        calls.actors[name] = actor.remote(*arguments)
    yield calls
    calls.stop()


def sync_of(calls, **options):
    section = {
        "control": None,
        "control_access": dict.fromkeys(("tls_ca", "tls_name", "token_file", "token_env")),
        "host": "127.0.0.1",
        "advertised_host": None,
        "transport": "tcp",
        "generation_tensor_parallel": 2,
        "timeout_s": 30.0,
    }
    config = RefitSection.model_validate({**section, **options})
    return RefitWeightSync(
        calls, config, name="m", sources=["source 0", "source 1"], targets=["target"]
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"host": "node"},
        pytest.param({"host": "0.0.0.0"}, marks=pytest.mark.long),
        {"host": "::", "advertised_host": "node"},
    ],
)
def test_each_worker_advertises_its_machine_s_address(calls, options):
    sync = sync_of(calls, **options)
    try:
        sync.sync(1)
        endpoints = [calls.call(name, "endpoint") for name in ("source 0", "source 1")]
        assert [each.rpartition(":")[0] for each in endpoints] == [DRIVER, OTHER]
        assert torch.equal(calls.call("target", "state"), weights(1))
    finally:
        sync.close()


class ForgetfulControlPlane:
    """Control plane that restarts without its state after a number of workers' answers.

    Args:
        times: number of restarts.
    """

    def __init__(self, times, port):
        self.server = EmbeddedControlServer(port=port)
        self.address = self.server.address
        self.left = 0
        self.after = 0
        self._port = port
        self._times = times
        self._answers = 0

    def arm(self, after):
        self.left, self.after, self._answers = self._times, after, 0

    def __call__(self, name, direction, what):
        if direction == "received":
            self._answers += 1
            if self.left and self._answers == self.after:
                self.left -= 1
                self._answers = 0
                self.server.close()
                self.server = EmbeddedControlServer(port=self._port)


@pytest.fixture
def forgetful(machines, request):
    with hold_port() as holder:
        plane = ForgetfulControlPlane(request.param, holder.getsockname()[1])
        yield plane
        plane.server.close()


@pytest.fixture
def calls_here(forgetful):
    """Calls to two sources and a target on the driver's machine."""
    calls = ActorCalls(timeout_s=60, observer=forgetful)
    for name, arguments in (("source 0", (0, 2)), ("source 1", (1, 2)), ("target", (None, 2))):
        actor = ray.remote(Worker).options(num_cpus=0.1, resources={"driver": 0.1})
        calls.actors[name] = actor.remote(*arguments)
    yield calls
    calls.stop()


@pytest.mark.slow
@pytest.mark.parametrize("forgetful", [1], indirect=True)
@pytest.mark.parametrize(
    "answers",
    [
        pytest.param(1, id="after one answer"),
        pytest.param(2, id="after both", marks=pytest.mark.long),
    ],
)
def test_a_version_is_published_again_after_the_state_is_lost(calls_here, forgetful, answers):
    sync = sync_of(calls_here, control=forgetful.address)
    try:
        sync.sync(1)
        forgetful.arm(answers)
        sync.refit(2)
        assert forgetful.left == 0
        assert torch.equal(calls_here.call("target", "state"), weights(2))
        sync.refit(3)
        assert torch.equal(calls_here.call("target", "state"), weights(3))
    finally:
        sync.close()


@pytest.mark.slow
@pytest.mark.parametrize("forgetful", [2], indirect=True)
def test_a_control_plane_that_keeps_losing_state_ends_the_run(calls_here, forgetful):
    sync = sync_of(calls_here, control=forgetful.address)
    try:
        forgetful.arm(2)
        with pytest.raises(WorkerError, match="target: install_weights failed"):
            sync.sync(1)
        assert forgetful.left == 0
    finally:
        sync.close()


@pytest.mark.slow
def test_loopback_is_refused_for_workers_on_another_machine(calls):
    with pytest.raises(WorkerError) as caught:
        sync_of(calls)
    said = str(caught.value)
    assert said.startswith("refit.host: 127.0.0.1 is reachable from one machine only")
    assert f"driver on {DRIVER}, source 0 on {DRIVER}, source 1 on {OTHER}" in said
    assert said.endswith("set refit.host to 'node'")
