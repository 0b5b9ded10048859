"""A process listens on one address and may advertise another; the default is loopback."""

import socket
import sys

import pytest
import torch

from refit_mx import (
    ControlClient,
    EmbeddedControlServer,
    MxV2RefitReceiver,
    MxV2TrainingPublisher,
    RefitConfigError,
    TensorSpec,
    replicated_target,
)

WEIGHTS = {"w": torch.arange(12.0).view(3, 4)}


linux = pytest.mark.skipif(
    sys.platform != "linux", reason="needs Linux, whose loopback interface has all of 127.0.0.0/8"
)


@linux
@pytest.mark.parametrize(
    ("hosts", "reported"),
    [
        ({}, "127.0.0.1"),
        ({"host": "127.0.0.2"}, "127.0.0.2"),
        ({"host": "::1"}, "[::1]"),
        ({"host": "0.0.0.0", "advertised_host": "10.0.0.1"}, "10.0.0.1"),
        ({"advertised_host": "fd00::1"}, "[fd00::1]"),
    ],
)
def test_control_plane_reports_its_advertised_address(hosts, reported):
    with EmbeddedControlServer(**hosts) as server:
        assert server.address.rpartition(":")[0] == reported


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_wildcard_address_is_never_reported(host):
    with EmbeddedControlServer() as server:
        for hosts in ({"host": host}, {"host": "127.0.0.1", "advertised_host": host}):
            with pytest.raises(RefitConfigError, match="set advertised_host"):
                EmbeddedControlServer(**hosts)
            with pytest.raises(RefitConfigError, match="set advertised_host"):
                MxV2TrainingPublisher("m", "a", control=server.address, transports=["tcp"], **hosts)


# No other process listens here. On 127.0.0.1, one may use the publisher's port of 127.0.0.2.
UNUSED_HOST = "127.0.0.9"


def can_connect(host, endpoint):
    try:
        socket.create_connection((host, int(endpoint.rpartition(":")[2])), timeout=5).close()
    except ConnectionRefusedError:
        return False
    return True


@linux
@pytest.mark.parametrize(
    ("options", "open_at_all"),
    [
        ({}, False),
        ({"host": "127.0.0.2"}, False),
        ({"host": "0.0.0.0", "advertised_host": "127.0.0.3"}, True),
        ({"host": "::", "advertised_host": "127.0.0.3"}, True),
    ],
)
def test_publisher_listens_only_on_its_host(options, open_at_all):
    advertised = options.get("advertised_host") or options.get("host") or "127.0.0.1"
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
            assert endpoint.rpartition(":")[0] == advertised
            assert can_connect(advertised, endpoint)
            assert can_connect(UNUSED_HOST, endpoint) == open_at_all
        live = {"w": torch.zeros(3, 4)}
        target = replicated_target(TensorSpec("w", "float32", (3, 4)))
        with MxV2RefitReceiver("m", control=control, targets=[target], transport="tcp") as receiver:
            receiver.refit("v1", live)
        assert torch.equal(live["w"], WEIGHTS["w"])
