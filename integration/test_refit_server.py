"""A run whose control plane is a refit server with TLS and a token, in a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_trainer.refit_settings import RefitSettings
from grpo_trainer.refit_source import slot, start_source
from grpo_trainer.refit_target import start_target
from refit_mx import ControlAccessError, ControlUnavailableError, RefitConfigError, RefitError

COMMAND = str(Path(sysconfig.get_path("scripts")) / "grpo-trainer")
TOKEN = "0123456789abcdef-0123456789abcdef"
WRONG = "another-token-of-its-length-here!"
TIMEOUT_S = 20.0

pytestmark = pytest.mark.debian("openssl")


@dataclass
class Server:
    """Where it is, and what it trusts and wants."""

    address: str
    ca: str
    other_ca: str
    token_file: str
    wrong_file: str


def certificate(folder: Path, name: str) -> str:
    made = folder / f"{name}.crt"
    command = ["openssl", "req", "-x509", "-days", "2", "-nodes", "-newkey", "ec"]
    curve = ["-pkeyopt", "ec_paramgen_curve:prime256v1"]
    subject = ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(made.with_suffix(".key")), "-out", str(made)]
    subprocess.run([*command, *curve, *subject, *files], check=True, capture_output=True)
    return str(made)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    ca = certificate(folder, "refit")
    for name, token in (("token", TOKEN), ("wrong", WRONG)):
        (folder / name).write_text(f"{token}\n")
    options = ["--tls-cert", ca, "--tls-key", ca.replace(".crt", ".key")]
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "refit_server", "serve", "--address", "127.0.0.1:0"),
            *(*options, "--token-file", str(folder / "token")),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address
        yield Server(
            address, ca, certificate(folder, "other"), str(folder / "token"), str(folder / "wrong")
        )
        process.terminate()
        assert TOKEN not in "".join(process.communicate(timeout=60))
    finally:
        process.kill()
        process.communicate()


def train(
    server: Server, folder: Path, *, token: str | None = None, **access: str
) -> subprocess.CompletedProcess[str]:
    """One small step of the command, with the files of Ray below ``folder``."""
    changes: dict[str, Any] = {
        "refit.control": server.address,
        **{f"refit.control_access.{key}": value for key, value in access.items()},
        "cluster.temp_dir": str(folder),
        "grpo.num_steps": 1,
        "grpo.dynamic_sampling.enabled": "false",
        "validation.every_steps": 0,
        "checkpointing.every_steps": 1,
    }
    told = [part for key, value in changes.items() for part in ("--set", f"{key}={value}")]
    environment = {**os.environ, **({"TOKEN_OF_A_TEST": token} if token is not None else {})}
    return subprocess.run(
        [COMMAND, "train", "--output", str(folder / "runs"), *told],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def assert_nowhere(secret: str, folder: Path, done: subprocess.CompletedProcess[str]) -> None:
    """Not in what was written, neither by the command nor by any process of the run."""
    assert secret not in done.stdout + done.stderr
    for file in folder.rglob("*"):
        if file.is_file() and not file.is_symlink():
            assert secret.encode() not in file.read_bytes(), file


@pytest.fixture
def short() -> Iterator[Path]:
    """A short path: Ray's sockets lie below it."""
    folder = Path(tempfile.mkdtemp(prefix="it-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
def test_a_run_trains_through_it_and_writes_the_token_nowhere(server: Server, short: Path) -> None:
    done = train(server, short, token=TOKEN, tls_ca=server.ca, token_env="TOKEN_OF_A_TEST")
    assert done.returncode == 0, done.stderr
    assert_nowhere(TOKEN, short, done)


@pytest.mark.slow
def test_a_run_with_a_wrong_token_ends_with_one_line(server: Server, short: Path) -> None:
    done = train(server, short, tls_ca=server.ca, token_file=server.wrong_file)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert f"refit: control plane at {server.address}" in done.stderr
    assert "a valid bearer token is required" in done.stderr
    assert_nowhere(WRONG, short, done)
    assert not any(short.iterdir())  # no Ray was started, and no folder made


def settings(server: Server, **access: str | None) -> dict[str, Any]:
    found = dict.fromkeys(("tls_ca", "tls_name", "token_file", "token_env"))
    return RefitSettings(
        control=server.address,
        control_access={**found, **access},
        model_name="m",
        transport="tcp",
        host="127.0.0.1",
        advertised_host=None,
        tensor_parallel=2,
        timeout_s=TIMEOUT_S,
    ).model_dump()


def test_what_policy_and_generation_workers_hold_refits_through_it(server: Server) -> None:
    told = settings(server, tls_ca=server.ca, token_file=server.token_file)
    assert TOKEN not in repr(told)
    weights = {"w": torch.arange(24.0).view(6, 4), "b": torch.ones(4)}
    live = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    sources = [start_source(told, rank=rank, world=2) for rank in range(2)]
    target = start_target(told, live)
    with RefitSettings.model_validate(told).connect() as control:
        control.create_version("m", [slot(0), slot(1)], idempotency_key="v1", version_id="v1")
        for source in sources:
            source.publish("v1", weights)
        target.refit("v1")
    assert all(torch.equal(live[name], weight) for name, weight in weights.items())
    target.close()
    for source in sources:
        source.close()


def test_a_worker_without_the_variable_of_its_token_names_it(server: Server) -> None:
    told = settings(server, tls_ca=server.ca, token_env="TOKEN_OF_A_TEST")
    with pytest.raises(RefitConfigError, match="variable TOKEN_OF_A_TEST is not set"):
        start_source(told, rank=0, world=1)


@pytest.mark.parametrize(
    ("wrong", "error", "named"),
    [
        ("token", ControlAccessError, "a valid bearer token is required"),
        ("certificate", ControlAccessError, "its certificate is not of tls_ca"),
        ("no tls", ControlUnavailableError, "control plane at"),
    ],
)
def test_a_worker_that_is_not_let_in_is_told_so_at_once(
    server: Server, wrong: str, error: type[RefitError], named: str, capfd: Any
) -> None:
    told = settings(
        server,
        tls_ca={"certificate": server.other_ca, "no tls": None}.get(wrong, server.ca),
        token_file=server.wrong_file if wrong == "token" else server.token_file,
    )
    began = time.monotonic()
    for start in (
        lambda: start_source(told, rank=0, world=1),
        lambda: start_target(told, {"w": torch.zeros(2)}),
    ):
        with pytest.raises(error, match=named) as caught:
            start()
        assert TOKEN not in str(caught.value)
        assert WRONG not in str(caught.value)
    assert time.monotonic() - began < TIMEOUT_S
    written = "".join(capfd.readouterr())
    assert TOKEN not in written
    assert WRONG not in written
