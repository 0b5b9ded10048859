"""A run whose control plane is a refit server with TLS and a token, in a separate process.

Errors of one process are tested on `RefitSource` and `RefitTarget`, without a run. Imports
internals: a run does not show the errors of one process.
"""

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

from grpo_trainer.refit.settings import RefitSettings
from grpo_trainer.refit.source import RefitSource, slot
from grpo_trainer.refit.target import RefitTarget
from refit_mx import ControlAccessError, ControlUnavailableError, RefitConfigError, RefitError

COMMAND = str(Path(sysconfig.get_path("scripts")) / "grpo-trainer")
TOKEN = "0123456789abcdef-0123456789abcdef"
WRONG = "another-token-of-its-length-here!"
TIMEOUT_S = 20.0

pytestmark = pytest.mark.debian("openssl")


@dataclass
class Server:
    """A refit server's address, with right and wrong certificates and tokens."""

    address: str
    ca: str
    other_ca: str
    token_file: str
    wrong_file: str


def certificate(folder: Path, name: str) -> str:
    path = folder / f"{name}.crt"
    command = ["openssl", "req", "-x509", "-days", "2", "-nodes", "-newkey", "ec"]
    curve = ["-pkeyopt", "ec_paramgen_curve:prime256v1"]
    subject = ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(path.with_suffix(".key")), "-out", str(path)]
    subprocess.run([*command, *curve, *subject, *files], check=True, capture_output=True)
    return str(path)


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
    """Run one small step by the command line, with a complete Ray below ``folder``."""
    changes: dict[str, Any] = {
        "refit.control": server.address,
        **{f"refit.control_access.{key}": value for key, value in access.items()},
        "cluster.temp_dir": str(folder),
        "grpo.num_steps": 1,
        "grpo.num_prompts_per_step": 8,
        "grpo.num_generations_per_prompt": 8,
        "policy.global_batch_size": 64,
        "data_plane.transfer_queue_mirror": "false",
        "grpo.dynamic_sampling.enabled": "false",
        "validation.every_steps": 0,
        "checkpointing.every_steps": 1,
    }
    options = [part for key, value in changes.items() for part in ("--set", f"{key}={value}")]
    environment = {**os.environ, **({"TOKEN_OF_A_TEST": token} if token is not None else {})}
    return subprocess.run(
        [COMMAND, "train", "--output", str(folder / "runs"), *options],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def assert_not_written(secret: str, folder: Path, done: subprocess.CompletedProcess[str]) -> None:
    """Check that neither the command's output nor a file below ``folder`` has the secret."""
    assert secret not in done.stdout + done.stderr
    for file in folder.rglob("*"):
        if file.is_file() and not file.is_symlink():
            assert secret.encode() not in file.read_bytes(), file


@pytest.fixture
def short() -> Iterator[Path]:
    """Yield a folder with a short path, since Ray's sockets are below it."""
    folder = Path(tempfile.mkdtemp(prefix="it-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
def test_run_trains_and_writes_the_token_nowhere(server: Server, short: Path) -> None:
    done = train(server, short, token=TOKEN, tls_ca=server.ca, token_env="TOKEN_OF_A_TEST")
    assert done.returncode == 0, done.stderr
    assert_not_written(TOKEN, short, done)


@pytest.mark.slow
def test_run_with_a_wrong_token_prints_one_line(server: Server, short: Path) -> None:
    done = train(server, short, tls_ca=server.ca, token_file=server.wrong_file)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert f"refit: control plane at {server.address}" in done.stderr
    assert "a valid bearer token is required" in done.stderr
    assert_not_written(WRONG, short, done)
    assert not any(short.iterdir())  # neither Ray nor the run has started


def settings(server: Server, **access: Path | str | None) -> RefitSettings:
    defaults = dict.fromkeys(("tls_ca", "tls_name", "token_file", "token_env"))
    return RefitSettings(
        control=server.address,
        control_access={**defaults, **access},
        model_name="m",
        transport="tcp",
        host="127.0.0.1",
        advertised_host=None,
        generation_tensor_parallel=2,
        timeout_s=TIMEOUT_S,
    )


def test_workers_refit_through_the_server(server: Server) -> None:
    section = settings(server, tls_ca=server.ca, token_file=server.token_file)
    assert TOKEN not in repr(section)
    weights = {"w": torch.arange(24.0).view(6, 4), "b": torch.ones(4)}
    live = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    sources = [RefitSource(section, rank=rank, world=2) for rank in range(2)]
    target = RefitTarget(section, live)
    with section.connect() as control:
        control.create_version("m", [slot(0), slot(1)], idempotency_key="v1", version_id="v1")
        for source in sources:
            source.publish("v1", weights)
        target.refit("v1")
    assert all(torch.equal(live[name], weight) for name, weight in weights.items())
    target.close()
    for source in sources:
        source.close()


def test_missing_token_variable_is_named(server: Server) -> None:
    section = settings(server, tls_ca=server.ca, token_env="TOKEN_OF_A_TEST")
    with pytest.raises(RefitConfigError, match="variable TOKEN_OF_A_TEST is not set"):
        RefitSource(section, rank=0, world=1)


@pytest.mark.parametrize(
    ("wrong", "error", "named"),
    [
        ("token", ControlAccessError, "a valid bearer token is required"),
        ("certificate", ControlAccessError, "its certificate is not signed by tls_ca"),
        ("no tls", ControlUnavailableError, "control plane at"),
    ],
)
def test_refused_worker_fails_at_once(
    server: Server, wrong: str, error: type[RefitError], named: str, capfd: Any
) -> None:
    section = settings(
        server,
        tls_ca={"certificate": server.other_ca, "no tls": None}.get(wrong, server.ca),
        token_file=server.wrong_file if wrong == "token" else server.token_file,
    )
    began = time.monotonic()
    for start in (
        lambda: RefitSource(section, rank=0, world=1),
        lambda: RefitTarget(section, {"w": torch.zeros(2)}),
    ):
        with pytest.raises(error, match=named) as caught:
            start()
        assert TOKEN not in str(caught.value)
        assert WRONG not in str(caught.value)
    assert time.monotonic() - began < TIMEOUT_S
    written = "".join(capfd.readouterr())
    assert TOKEN not in written
    assert WRONG not in written
