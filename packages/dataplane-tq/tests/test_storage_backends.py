"""Start, refusal and stop of storage backends.

The supervision of daemons (`DaemonActor`) is tested directly, because a backend's daemon is the
vendor's program and cannot be made to fail. So is the configuration for TransferQueue: only packed
has a manager that TransferQueue lacks. So internals are imported.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import textwrap
import uuid
from pathlib import Path

import pytest
import ray
from directory_calls import until
from queue_setup import CONFIG
from transfer_queue.controller import TransferQueueController

from dataplane_core import ConfigError, UnavailableError
from dataplane_tq import TQDataPlaneClient
from dataplane_tq.storage import BACKENDS
from dataplane_tq.storage.daemon import DaemonActor, end_daemon
from dataplane_tq.topology import ConnectionData, _for_transfer_queue

pytestmark = pytest.mark.slow

DAEMONS = [name for name, kind in BACKENDS.items() if not kind.survivable]
NAMESPACE = "transfer_queue"


@pytest.fixture
def controller(cluster):
    actor = TransferQueueController.options(
        name="TransferQueueController", namespace=NAMESPACE, num_cpus=0.1
    ).remote(polling_mode=True)
    ray.get(actor.get_zmq_server_info.remote(), timeout=180)
    yield
    ray.kill(actor)
    until(lambda: not named_actors())


def named_actors():
    return {actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)}


def processes_of(actor):
    """Return the process ids of a daemon's actor, and its folder."""
    pids = ray.get(actor.pids.remote(), timeout=180)
    folder = ray.get(actor.__ray_call__.remote(lambda owner: owner.folder), timeout=180)
    assert len(pids) == 2
    assert folder.exists()
    return pids, folder


def gone(pids, folder):
    """Return True if the processes and the folder are gone; a zombie counts as gone."""
    statuses = [Path(f"/proc/{pid}/stat") for pid in pids]
    alive = [s for s in statuses if s.exists() and s.read_text().rsplit(")")[-1].split()[0] != "Z"]
    return not alive and not folder.exists()


@pytest.mark.parametrize("name", DAEMONS)
def test_stop_leaves_no_process_and_no_file(cluster, require_backend, name):
    backend = BACKENDS[require_backend(name)]()
    cfg = {**CONFIG, "backend": name}
    backend.start(cfg, uuid.uuid4().hex)
    [owner] = [actor for actor in backend.actors.values() if hasattr(actor, "pids")]
    pids, folder = processes_of(owner)
    mapped = [line for pid in pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    assert not [line for line in mapped if "/dev/shm/" in line]
    backend.stop()
    until(lambda: gone(pids, folder), timeout_s=2)  # the kernel finishes the exit


def test_stopping_after_a_shutdown_of_ray_starts_no_other(monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    end_daemon(None)  # a call would raise


@pytest.fixture
def daemon(cluster):
    """Yield an actor with a running daemon."""
    actor = ray.remote(DaemonActor).options(num_cpus=0.1).remote()
    started = actor.run.remote(["/bin/sleep", "600"], ready=lambda: True, timeout_s=30)
    ray.get(started, timeout=180)
    until(lambda: ray.get(actor.pids.remote(), timeout=180))
    yield actor
    ray.kill(actor)


@pytest.mark.parametrize("which", [0, 1], ids=["supervisor", "daemon"])
def test_actor_ends_with_its_daemon(daemon, which):
    pids, folder = processes_of(daemon)
    os.kill(pids[which], signal.SIGKILL)
    with pytest.raises(ray.exceptions.RayActorError):
        until(lambda: ray.get(daemon.pids.remote(), timeout=180) is None)
    until(lambda: gone(pids, folder))


@pytest.mark.parametrize("how", ["SIGKILL", "ray.kill"])
def test_daemon_ends_with_its_actor(daemon, how):
    pids, folder = processes_of(daemon)
    if how == "SIGKILL":
        owner = ray.get(daemon.__ray_call__.remote(lambda _: os.getpid()), timeout=180)
        os.kill(owner, signal.SIGKILL)
    else:
        ray.kill(daemon)
    until(lambda: gone(pids, folder))


def test_daemon_ends_with_a_killed_driver(cluster):
    script = """
        import sys, ray
        from dataplane_tq import join_ray
        from dataplane_tq.storage.daemon import DaemonActor
        join_ray(sys.argv[1], logging_level="ERROR", log_to_driver=False)
        actor = ray.remote(DaemonActor).options(num_cpus=0.1).remote()
        sleep = ["/bin/sleep", "600"]
        ray.get(actor.run.remote(sleep, ready=lambda: True, timeout_s=30), timeout=180)
        while not (pids := ray.get(actor.pids.remote())):
            pass
        print(*pids)
        print(ray.get(actor.__ray_call__.remote(lambda owner: owner.folder)), flush=True)
        sys.stdin.read()
    """
    address = ray.get_runtime_context().gcs_address
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as driver:
        pids = [int(pid) for pid in driver.stdout.readline().split()]
        folder = Path(driver.stdout.readline().strip())
        assert len(pids) == 2
        assert folder.exists()
        driver.kill()
    until(lambda: gone(pids, folder))


@pytest.mark.parametrize(
    ("command", "timeout_s", "message"),
    [
        (["/bin/sh", "-c", "echo first; echo no port >&2; exit 3"], 30.0, "ended while"),
        (["/bin/sh", "-c", "echo no port; exec sleep 600"], 1.0, "not ready after 1 s"),
        (["/no port"], 30.0, "No such file"),
    ],
)
def test_failed_start_reports_the_last_output(command, timeout_s, message):
    owner = DaemonActor()
    with pytest.raises(UnavailableError, match=message) as error:
        owner.run(command, ready=lambda: False, timeout_s=timeout_s)
    assert "no port" in str(error.value)
    until(lambda: gone(owner.pids(), owner.folder), timeout_s=2)


def test_foreign_transfer_queue_is_refused(controller):
    cfg = {**CONFIG, "ack_timeout_ms": 100}
    with pytest.raises(ConfigError, match=r"dataplane-tq did not start.*a separate Ray cluster"):
        TQDataPlaneClient(cfg)
    with pytest.raises(UnavailableError, match=r"dataplane-tq did not start.*cannot attach"):
        TQDataPlaneClient(cfg, bootstrap=False)


def test_any_error_of_a_start_stops_what_was_started(cluster, monkeypatch):
    class Failing(BACKENDS["simple"]):
        def start(self, cfg, namespace):
            super().start(cfg, namespace)
            raise OSError("disk full")

    monkeypatch.setitem(BACKENDS, "failing", Failing)
    with pytest.raises(OSError, match="disk full") as error:
        TQDataPlaneClient({**CONFIG, "backend": "failing", "num_storage_units": 1})
    assert error.tb  # the traceback holds the actors' handles, which keep unstopped actors alive
    until(lambda: not named_actors())


@pytest.mark.parametrize("name", sorted(BACKENDS))
def test_plain_transfer_queue_process_knows_the_manager(name):
    """Unpickling the configuration registers a manager of this package, and loads no other."""
    config = _for_transfer_queue(ConnectionData(name, None, {}, None, {}))
    code = """
        import pickle, sys, transfer_queue
        from transfer_queue.storage.managers.base import StorageManagerFactory
        name = pickle.load(sys.stdin.buffer).backend.storage_backend
        manager = StorageManagerFactory._registry[name].__module__
        assert ("dataplane_tq" in sys.modules) == manager.startswith("dataplane_tq."), manager
    """
    program = [sys.executable, "-c", textwrap.dedent(code)]
    subprocess.run(program, input=pickle.dumps(config), check=True, timeout=120)


@pytest.mark.parametrize("name", DAEMONS)
def test_check_names_the_key_and_the_extra(name, monkeypatch):
    with pytest.raises(ConfigError, match=r"global_segment_size: found 1; .* at least"):
        BACKENDS[name].check({**CONFIG, "backend": name, "global_segment_size": 1})
    monkeypatch.setattr("dataplane_tq.storage.base.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"the extra dataplane-tq\[\w+\], on Python 3\.11 "):
        BACKENDS[name].check({**CONFIG, "backend": name})
