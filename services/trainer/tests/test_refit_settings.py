"""A control plane that a run does not start itself is asked before anything of the run exists."""

from __future__ import annotations

import socket
import time

import pytest

from grpo_trainer import refit_settings
from grpo_trainer.config import load_config
from grpo_trainer.errors import WorkerError
from grpo_trainer.refit_settings import check_control
from refit_mx import ControlClient, EmbeddedControlServer


def section(address=None):
    overrides = [] if address is None else [f"refit.control={address}"]
    return load_config(overrides=overrides).refit


@pytest.fixture
def nobody():
    """An address where nobody listens, and nobody else can."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield "{}:{}".format(*taken.getsockname())


def test_one_that_answers_is_taken_and_learns_nothing():
    with EmbeddedControlServer() as server:
        check_control(section(server.address))


def test_a_run_with_its_own_asks_nobody(monkeypatch):
    monkeypatch.setattr(refit_settings, "connect", None)
    check_control(section())


def test_where_nobody_answers_the_error_names_the_address(nobody, monkeypatch):
    monkeypatch.setattr(refit_settings, "PATIENCE_S", 0.3)
    began = time.monotonic()
    with pytest.raises(WorkerError, match=f"refit: control plane at {nobody}: "):
        check_control(section(nobody))
    assert time.monotonic() - began < 10


def test_a_token_that_is_missing_is_told_at_once(monkeypatch):
    monkeypatch.setattr(refit_settings, "PATIENCE_S", 1e9)
    token = "0123456789abcdef-0123456789abcdef"
    with (
        EmbeddedControlServer(token=token) as server,
        pytest.raises(WorkerError, match="a valid bearer token is required"),
    ):
        check_control(section(server.address))


def test_one_that_comes_a_moment_later_is_waited_for(monkeypatch):
    with EmbeddedControlServer() as first:
        address = first.address
    servers = []

    class Late(ControlClient):
        def close(self):
            super().close()
            if not servers:
                servers.append(EmbeddedControlServer(port=int(address.rpartition(":")[2])))

    monkeypatch.setattr(refit_settings, "connect", lambda where, access: Late(where))
    monkeypatch.setattr(refit_settings, "PATIENCE_S", 60)
    try:
        check_control(section(address))
        assert len(servers) == 1
    finally:
        for server in servers:
            server.close()
