"""Real server processes, killed by their id after each test."""

import select
import subprocess
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from refit_server.cli import app

COMMAND = str(Path(sysconfig.get_path("scripts")) / "refit-server")
TIMEOUT_S = 60.0


class Server:
    """A server process with the address that it printed."""

    def __init__(self, command):
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def wait_for_address(self):
        ready, _, _ = select.select([self.process.stdout], [], [], TIMEOUT_S)
        assert ready, f"no line of output within {TIMEOUT_S:g} s"
        self.address = self.process.stdout.readline().strip()
        assert self.address, self.process.stderr.read()
        return self

    def signal(self, number):
        self.signalled_at = time.monotonic()
        self.process.send_signal(number)

    def wait(self):
        """Return the status, the seconds since the signal, and the output after the address."""
        out, err = self.process.communicate(timeout=TIMEOUT_S)
        return self.process.returncode, time.monotonic() - self.signalled_at, out + err


@pytest.fixture
def start():
    servers = []

    def start_server(*arguments, command=(COMMAND, "serve", "--address", "127.0.0.1:0")):
        servers.append(Server([*command, *arguments]))
        return servers[-1].wait_for_address()

    yield start_server
    for server in servers:
        server.process.kill()
        server.process.communicate()


@pytest.fixture
def refused():
    """Start a server with wrong options in this process; return the lines of standard error."""

    def run(*arguments, lines=1):
        done = CliRunner().invoke(app, ["serve", *arguments])
        assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", lines)
        return done.stderr

    return run


@pytest.fixture
def failed():
    """Start a server that must exit with status 1; return its line of standard error."""

    def run(*arguments):
        done = subprocess.run(
            [COMMAND, "serve", *arguments],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
        return done.stderr

    return run


@dataclass
class Certificate:
    cert: Path
    key: Path

    @property
    def options(self):
        return ("--tls-cert", str(self.cert), "--tls-key", str(self.key))


@pytest.fixture
def certificate(tmp_path):
    """Create self-signed certificates, with or without a passphrase on the key."""

    def make(name, *, passphrase=None, of="IP:127.0.0.1"):
        certificate = Certificate(tmp_path / f"{name}.crt", tmp_path / f"{name}.key")
        subject = ["-subj", f"/CN={name}", "-addext", f"subjectAltName={of}"]
        secret = ["-nodes"] if passphrase is None else ["-passout", f"pass:{passphrase}"]
        curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
        files = ["-keyout", str(certificate.key), "-out", str(certificate.cert)]
        subprocess.run(
            ["openssl", "req", "-x509", "-days", "2", *curve, *secret, *subject, *files],
            check=True,
            capture_output=True,
        )
        return certificate

    return make


TOKEN = "0123456789abcdef-0123456789abcdef"


@pytest.fixture
def token_file(tmp_path):
    """Create a file with `TOKEN`."""
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    return file
