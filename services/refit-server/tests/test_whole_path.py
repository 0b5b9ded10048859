"""The whole path through a server with TLS and a token: publisher, receiver, vLLM's engine."""

import time

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
    tp_target,
)
from refit_mx.engine.infos import MxInitInfo, MxUpdateInfo
from refit_mx.engine.weight_transfer import MxWeightTransfer

TOKEN = "0123456789abcdef-0123456789abcdef"
TIMEOUT_S = 20.0
NAME = "refit.example"
SPEC = TensorSpec("up", "float32", (6, 4))
WEIGHTS = {"up": torch.arange(24, dtype=torch.float32).view(6, 4)}


@pytest.fixture
def secure(start, certificate, token_file):
    """A server, and how it is reached."""
    made = certificate("refit", of=f"DNS:{NAME}")
    server = start(
        "--tls-cert", str(made.cert), "--tls-key", str(made.key), "--token-file", str(token_file)
    )
    access = ControlAccess(tls_ca=str(made.cert), tls_name=NAME, token_file=str(token_file))
    return server, access


@pytest.fixture
def published(secure):
    """A client of the server, by which a publisher has published version v1 and lives."""
    server, access = secure
    with access.connect(server.address) as control:
        control.create_version("m", ["a"], idempotency_key="v1", version_id="v1")
        with MxV2TrainingPublisher("m", "a", control=control, transports=("tcp",)) as publisher:
            publisher.publish("v1", WEIGHTS)
            yield control


def engine_of(server):
    engine = MxWeightTransfer(model=None, model_name="m")
    engine.init(MxInitInfo(control_address=server.address, transport="tcp", timeout_s=TIMEOUT_S))
    return engine


def set_environment(monkeypatch, access):
    monkeypatch.setenv("REFIT_MX_CONTROL_TLS_CA", access.tls_ca)
    monkeypatch.setenv("REFIT_MX_CONTROL_TLS_NAME", access.tls_name)
    monkeypatch.setenv("REFIT_MX_CONTROL_TOKEN_FILE", access.token_file)


def test_a_receiver_installs_what_a_publisher_offers(published, capfd):
    target = tp_target(SPEC, TargetTPLayout(world_size=2, rank=1))
    live = {"up": torch.zeros(3, 4)}
    with MxV2RefitReceiver("m", control=published, targets=[target], transport="tcp") as receiver:
        receiver.refit("v1", live, timeout_s=TIMEOUT_S)
    assert torch.equal(live["up"], WEIGHTS["up"][3:])
    assert TOKEN not in "".join(capfd.readouterr())


@pytest.mark.usefixtures("published")
def test_the_engine_of_vllm_takes_it_from_its_environment(secure, monkeypatch, capfd):
    server, access = secure
    set_environment(monkeypatch, access)
    engine, loaded = engine_of(server), {}
    engine.receive_into(
        MxUpdateInfo("v1"), lambda named: loaded.update({n: t.clone() for n, t in named})
    )
    assert torch.equal(loaded["up"], WEIGHTS["up"])
    assert TOKEN not in repr((engine, vars(engine))) + "".join(capfd.readouterr())
    engine.shutdown()


WRONG = "another-token-of-its-length-here!"


@pytest.fixture(params=["token", "no token", "certificate", "name", "no tls"])
def wrong(request, secure, certificate, tmp_path):
    """A server, what of the access to it is wrong, and the error that says so."""
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
            return server, ControlAccess(other, name, file), ControlAccessError, "not of tls_ca"
        case "name":
            return server, ControlAccess(ca, None, file), ControlAccessError, "of another name"
        case _:
            return server, ControlAccess(None, None, file), ControlUnavailableError, "control plane"


def assert_told(began, caught, capfd, named):
    assert time.monotonic() - began < TIMEOUT_S
    written = str(caught.value) + repr(caught.value) + "".join(capfd.readouterr())
    assert named in str(caught.value)
    assert TOKEN not in written
    assert WRONG not in written


def test_a_publisher_that_is_not_let_in_is_told_so_at_once(wrong, capfd):
    server, access, error, named = wrong
    began = time.monotonic()
    with access.connect(server.address) as control, pytest.raises(error) as caught:
        MxV2TrainingPublisher("m", "a", control=control, transports=("tcp",))
    assert_told(began, caught, capfd, named)


def test_a_receiver_that_is_not_let_in_is_told_so_at_once(wrong, capfd):
    server, access, error, named = wrong
    began = time.monotonic()
    with access.connect(server.address) as control, pytest.raises(error) as caught:
        MxV2RefitReceiver("m", control=control, targets=[], transport="tcp")
    assert_told(began, caught, capfd, named)


def test_an_engine_that_is_not_let_in_is_told_so_within_its_deadline(wrong, monkeypatch, capfd):
    server, access, error, named = wrong
    for name, value in (
        ("TLS_CA", access.tls_ca),
        ("TLS_NAME", access.tls_name),
        ("TOKEN_FILE", access.token_file),
    ):
        monkeypatch.setenv(f"REFIT_MX_CONTROL_{name}", value or "")
    engine, began = engine_of(server), time.monotonic()
    with pytest.raises(error) as caught:
        engine.receive_into(MxUpdateInfo("v1"), lambda named: None)
    assert_told(began, caught, capfd, named)
    engine.shutdown()


def test_an_engine_brings_no_token_to_an_address_that_its_environment_does_not_trust(
    secure, monkeypatch
):
    _, access = secure
    monkeypatch.setenv("REFIT_MX_CONTROL_TOKEN_FILE", access.token_file)
    engine = MxWeightTransfer(model=None, model_name="m")
    with pytest.raises(RefitConfigError, match="in the clear"):
        engine.init(MxInitInfo(control_address="192.0.2.1:50051"))


def test_what_the_server_writes_has_no_token(secure, certificate):
    server, access = secure
    with access.connect(server.address) as control:
        control.create_version("m", ["a"], idempotency_key="v1", version_id="v1")
    stranger = ControlAccess(access.tls_ca, NAME).connect(server.address)
    with stranger, pytest.raises(ControlAccessError):
        stranger.get_version("v1")
    server.process.terminate()
    out, err = server.process.communicate(timeout=60)
    assert TOKEN not in out + err
