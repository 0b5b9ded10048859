"""Publisher and receiver through a server with TLS and a token.

The engine in vLLM reaches the server by `ControlAccess.from_environment`.
"""

import time
from functools import partial

import pytest
import torch

from refit_mx import (
    ControlAccess,
    ControlAccessError,
    ControlUnavailableError,
    MxV2RefitReceiver,
    MxV2TrainingPublisher,
    RefitConfigError,
    TargetTPLayout,
    TensorSpec,
    replicated_target,
    tp_target,
)

TOKEN = "0123456789abcdef-0123456789abcdef"
TIMEOUT_S = 20.0
NAME = "refit.example"
SPEC = TensorSpec("up", "float32", (6, 4))
WEIGHTS = {"up": torch.arange(24, dtype=torch.float32).view(6, 4)}


@pytest.fixture
def secure(start, certificate, token_file):
    """Return a server, and the access to it."""
    pair = certificate("refit", of=f"DNS:{NAME}")
    server = start(*pair.options, "--token-file", str(token_file))
    access = ControlAccess(tls_ca=str(pair.cert), tls_name=NAME, token_file=str(token_file))
    return server, access


@pytest.fixture
def published(secure):
    """Yield a client of the server while a publisher holds its version v1."""
    server, access = secure
    with access.connect(server.address) as control:
        control.create_version("m", ["a"], idempotency_key="v1", version_id="v1")
        with MxV2TrainingPublisher("m", "a", control=control, transports=("tcp",)) as publisher:
            publisher.publish("v1", WEIGHTS)
            yield control


def set_environment(monkeypatch, access):
    monkeypatch.setenv("REFIT_MX_CONTROL_TLS_CA", access.tls_ca or "")
    monkeypatch.setenv("REFIT_MX_CONTROL_TLS_NAME", access.tls_name or "")
    monkeypatch.setenv("REFIT_MX_CONTROL_TOKEN_FILE", access.token_file or "")


def test_receiver_installs_a_published_version(published, capfd):
    target = tp_target(SPEC, TargetTPLayout(world_size=2, rank=1))
    live = {"up": torch.zeros(3, 4)}
    with MxV2RefitReceiver("m", control=published, targets=[target], transport="tcp") as receiver:
        receiver.refit("v1", live, timeout_s=TIMEOUT_S)
    assert torch.equal(live["up"], WEIGHTS["up"][3:])
    assert TOKEN not in "".join(capfd.readouterr())


@pytest.mark.usefixtures("published")
def test_access_from_the_environment_fetches_a_version(secure, monkeypatch, capfd):
    server, access = secure
    set_environment(monkeypatch, access)
    live = {"up": torch.zeros(6, 4)}
    with ControlAccess.from_environment().connect(server.address) as control:
        target = replicated_target(SPEC)
        with MxV2RefitReceiver("m", control=control, targets=[target], transport="tcp") as receiver:
            receiver.refit("v1", live, timeout_s=TIMEOUT_S)
            assert TOKEN not in repr((receiver, vars(receiver), control))
    assert torch.equal(live["up"], WEIGHTS["up"])
    assert TOKEN not in "".join(capfd.readouterr())


WRONG = "another-token-of-its-length-here!"


@pytest.fixture(params=["token", "no token", "certificate", "name", "no tls"])
def wrong(request, secure, certificate, tmp_path):
    """Return a server, a wrong access to it, and the expected error with its message."""
    server, right = secure
    ca, name, file = right.tls_ca, right.tls_name, right.token_file
    match request.param:
        case "token":
            other = tmp_path / "wrong"
            other.write_text(WRONG)
            return server, ControlAccess(ca, name, str(other)), ControlAccessError, "bearer token"
        case "no token":
            return server, ControlAccess(ca, name), ControlAccessError, "bearer token"
        case "certificate":
            other = str(certificate("other", of=f"DNS:{NAME}").cert)
            return (
                server,
                ControlAccess(other, name, file),
                ControlAccessError,
                "not signed by tls_ca",
            )
        case "name":
            return server, ControlAccess(ca, None, file), ControlAccessError, "for another name"
        case _:
            return server, ControlAccess(None, None, file), ControlUnavailableError, "control plane"


def test_refused_client_gets_an_error_at_once(wrong, monkeypatch, capfd):
    server, access, error, named = wrong
    set_environment(monkeypatch, access)
    publisher = partial(MxV2TrainingPublisher, "m", "a", transports=("tcp",))
    receiver = partial(MxV2RefitReceiver, "m", targets=[], transport="tcp")
    for client, end in (
        (access, publisher),
        (access, receiver),
        (ControlAccess.from_environment(), receiver),
    ):
        began = time.monotonic()
        with client.connect(server.address) as control, pytest.raises(error) as caught:
            end(control=control)
        assert time.monotonic() - began < TIMEOUT_S
        written = str(caught.value) + repr(caught.value) + "".join(capfd.readouterr())
        assert named in str(caught.value)
        assert TOKEN not in written
        assert WRONG not in written


def test_environment_token_is_not_sent_unencrypted(secure, monkeypatch):
    _, access = secure
    monkeypatch.setenv("REFIT_MX_CONTROL_TOKEN_FILE", access.token_file)
    with pytest.raises(RefitConfigError, match="unencrypted"):
        ControlAccess.from_environment().connect("192.0.2.1:50051")


def test_server_never_writes_a_token(secure, certificate):
    server, access = secure
    with access.connect(server.address) as control:
        control.create_version("m", ["a"], idempotency_key="v1", version_id="v1")
    unauthorized = ControlAccess(access.tls_ca, NAME).connect(server.address)
    with unauthorized, pytest.raises(ControlAccessError):
        unauthorized.get_version("v1")
    server.process.terminate()
    out, err = server.process.communicate(timeout=60)
    assert TOKEN not in out + err
