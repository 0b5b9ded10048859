"""A process listens on one address and may tell others another one; loopback unless told so."""

import socket
import sys

import pytest
import torch

from refit_mx.control import ControlClient, EmbeddedControlServer
from refit_mx.errors import RefitConfigError
from refit_mx.hosts import host_and_port, told_host
from refit_mx.manifest_service import ManifestService
from refit_mx.plan.targets import replicated_target
from refit_mx.publisher import MxV2TrainingPublisher
from refit_mx.receiver import MxV2RefitReceiver
from refit_mx.source_server import SourceServer
from refit_mx.tensor_types import TensorSpec

EVERY_INTERFACE = ["0.0.0.0", "::", ""]
WEIGHTS = {"w": torch.arange(12.0).view(3, 4)}


linux = pytest.mark.skipif(
    sys.platform != "linux", reason="needs Linux, whose loopback interface has all of 127.0.0.0/8"
)


def all_of(**hosts):
    """Makes each kind of server there is; gives what each tells, and closes it."""
    found = []
    for make in (
        EmbeddedControlServer,
        ManifestService,
        lambda **options: SourceServer(incarnation="x", **options),
    ):
        server = make(**hosts)
        found.append(getattr(server, "endpoint", None) or server.address)
        server.close()
    return [each.rpartition(":")[0] for each in found]


@linux
def test_what_is_listened_on_is_told():
    assert all_of() == ["127.0.0.1"] * 3
    assert all_of(host="127.0.0.2") == ["127.0.0.2"] * 3
    assert all_of(host="::1") == ["[::1]"] * 3


def test_another_address_can_be_told():
    assert all_of(host="0.0.0.0", advertised_host="10.0.0.1") == ["10.0.0.1"] * 3
    assert all_of(host="127.0.0.1", advertised_host="fd00::1") == ["[fd00::1]"] * 3


@pytest.mark.parametrize("host", EVERY_INTERFACE)
def test_an_address_that_nobody_can_connect_to_is_never_told(host):
    for told in (lambda: told_host(host, None), lambda: told_host("127.0.0.1", host)):
        with pytest.raises(RefitConfigError, match="give an advertised_host"):
            told()
    for make in (EmbeddedControlServer, ManifestService):
        with pytest.raises(RefitConfigError, match="give an advertised_host"):
            make(host=host)


def test_an_ipv6_address_is_put_into_brackets():
    assert [host_and_port(each, 1) for each in ("a.b", "::1")] == ["a.b:1", "[::1]:1"]


def can_connect(host, endpoint):
    try:
        socket.create_connection((host, int(endpoint.rpartition(":")[2])), timeout=5).close()
    except ConnectionRefusedError:
        return False
    return True


@linux
@pytest.mark.parametrize(
    ("options", "open_at"),
    [
        ({}, {"127.0.0.1"}),
        ({"host": "127.0.0.2"}, {"127.0.0.2"}),
        ({"host": "0.0.0.0", "advertised_host": "127.0.0.3"}, {"127.0.0.1", "127.0.0.2"}),
        ({"host": "::", "advertised_host": "127.0.0.3"}, {"127.0.0.1", "127.0.0.2"}),
    ],
)
def test_a_publisher_is_reached_at_what_it_tells_and_listens_nowhere_else(options, open_at):
    told = options.get("advertised_host") or options.get("host") or "127.0.0.1"
    with (
        EmbeddedControlServer() as server,
        ControlClient(server.address) as control,
        MxV2TrainingPublisher(
            "m", "a", control=control, transports=("tcp",), **options
        ) as publisher,
    ):
        control.create_version("m", ["a"], idempotency_key="v1", version_id="v1")
        manifest = publisher.publish("v1", WEIGHTS)
        manifests = control.list_shards("v1")[0].manifest_endpoint
        for endpoint in (manifest.endpoint, manifests):
            assert endpoint.rpartition(":")[0] == told
            found = {host for host in ("127.0.0.1", "127.0.0.2") if can_connect(host, endpoint)}
            assert found == open_at
        live = {"w": torch.zeros(3, 4)}
        target = replicated_target(TensorSpec("w", "float32", (3, 4)))
        with MxV2RefitReceiver("m", control=control, targets=[target], transport="tcp") as receiver:
            receiver.refit("v1", live)
        assert torch.equal(live["w"], WEIGHTS["w"])
