"""Fixtures shared by several tests; also puts this folder on the path for the tests' programs.

Imports internals: a state of the control plane is made without a server.
"""

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
def many_descriptors():
    """Open many descriptors, so that the next one is larger than `select` accepts.

    Yields a lower bound of the next descriptor.
    """
    lowest = 1100
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * lowest
    maximum = hard if hard == resource.RLIM_INFINITY else max(hard, needed)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), maximum))
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
def port():
    """Reserve a port for a server that restarts."""
    from ports import held_port

    with held_port() as reserved:
        yield reserved


@pytest.fixture
def state():
    """Return the state of a control plane that retains all versions."""
    from refit_mx.control import Limits
    from refit_mx.control.state import ControlState

    return ControlState(Limits(retention=0))


@pytest.fixture
def server():
    """Run a control plane that retains all versions."""
    from refit_mx import EmbeddedControlServer
    from refit_mx.control import Limits

    with EmbeddedControlServer(limits=Limits(retention=0)) as running:
        yield running


@pytest.fixture
def client(server):
    """Connect a client to `server`."""
    from refit_mx import ControlClient

    with ControlClient(server.address) as connected:
        yield connected


@pytest.fixture
def stack():
    """Yield an exit stack that closes a test's resources after it."""
    with ExitStack() as resources:
        yield resources


@pytest.fixture
def in_small_batches(monkeypatch):
    """Make fetches of a few megabytes arrive in several batches."""
    from refit_fixtures import small_batches

    small_batches(monkeypatch, 1 << 18)


# The duration of an example depends on the machine's load.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


@pytest.fixture
def world():
    """Yield a `World` whose control plane releases versions only on request."""
    from refit_fixtures import a_world

    from refit_mx.control import Limits

    with a_world(limits=Limits(retention=100)) as fresh:
        yield fresh


@pytest.fixture
def published(world):
    """Publish v1 from two FSDP ranks; return the publishers and the weights."""
    publishers = [world.publisher(f"fsdp-{rank}") for rank in range(2)]
    return publishers, world.publish(publishers, "v1", 1)
