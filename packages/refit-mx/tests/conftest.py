"""Lets the tests import the programs that they run in other processes, and what several share."""

import os
import resource
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import settings

FOLDER = str(Path(__file__).parent)
if FOLDER not in sys.path:
    sys.path.insert(0, FOLDER)


@pytest.fixture
def no_vllm_is_left_behind():
    """Other tests of this process must not find the stand-in."""
    yield
    for name in [n for n in sys.modules if n.partition(".")[0] == "vllm"]:
        del sys.modules[name]
    sys.modules.pop("refit_mx.engine.vllm", None)


@pytest.fixture
def trainer():
    """Two ranks that publish versions of a model, see `engine_workers`."""
    from engine_workers import Trainer

    made = Trainer()
    yield made
    made.close()


@pytest.fixture
def workers():
    """The engines of one server of two ranks."""
    from engine_workers import Workers

    made = Workers()
    yield made
    made.close()


@pytest.fixture
def many_descriptors():
    """Next ones are this high, as in a process with many connections; more than `select` takes."""
    lowest = 1100
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * lowest
    most = hard if hard == resource.RLIM_INFINITY else max(hard, needed)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), most))
    except ValueError:
        pytest.skip(f"needs the capability CAP_SYS_RESOURCE, for {needed} descriptors")
    opened = [os.open(os.devnull, os.O_RDONLY)]
    while opened[-1] < lowest:
        opened.append(os.dup(opened[0]))
    yield lowest
    for descriptor in opened:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def state():
    """Of a control plane that keeps all versions."""
    from refit_mx.control.limits import Limits
    from refit_mx.control.state import ControlState

    return ControlState(Limits(retention=0))


@pytest.fixture
def server():
    """A control plane that keeps all versions."""
    from refit_mx.control import EmbeddedControlServer

    with EmbeddedControlServer(retention=0) as running:
        yield running


@pytest.fixture
def client(server):
    """Of that control plane."""
    from refit_mx.control import ControlClient

    with ControlClient(server.address) as connected:
        yield connected


@pytest.fixture
def stack():
    """What a test leaves to be closed."""
    with ExitStack() as made:
        yield made


@pytest.fixture
def in_small_batches(monkeypatch):
    """What happens in the middle of a fetch of some megabytes does."""
    from refit_fixtures import small_batches

    small_batches(monkeypatch, 1 << 18)


# How long an example takes depends on what else the machine does.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


@pytest.fixture
def world():
    """A control plane that releases no version by itself."""
    from refit_fixtures import a_world

    with a_world(retention=100) as made:
        yield made


@pytest.fixture
def published(world):
    """v1 from two FSDP ranks, and its weights."""
    publishers = [world.publisher(f"fsdp-{rank}") for rank in range(2)]
    return publishers, world.publish(publishers, "v1", 1)
