"""Real processes of the server, ended by their id whatever the test did."""

import select
import subprocess
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

COMMAND = str(Path(sysconfig.get_path("scripts")) / "refit-server")
PATIENCE_S = 60.0


class Server:
    """One process, and the address that it printed."""

    def __init__(self, command):
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def wait_for_address(self):
        ready, _, _ = select.select([self.process.stdout], [], [], PATIENCE_S)
        assert ready, f"no line of output within {PATIENCE_S:g} s"
        self.address = self.process.stdout.readline().strip()
        assert self.address, self.process.stderr.read()
        return self

    def signal(self, number):
        self.asked = time.monotonic()
        self.process.send_signal(number)

    def wait(self):
        """The status, the seconds since the signal, and what was written after the address."""
        out, err = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, time.monotonic() - self.asked, out + err


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
    """Run the command, which must end by itself; gives its status and what it wrote to stderr."""

    def run(*arguments):
        done = subprocess.run(
            [COMMAND, "serve", *arguments],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.stdout == ""
        return done.returncode, done.stderr

    return run


@dataclass
class Certificate:
    cert: Path
    key: Path


@pytest.fixture
def certificate(tmp_path):
    """Makes self-signed certificates, with or without a passphrase on the key."""

    def make(name, *, passphrase=None, of="IP:127.0.0.1"):
        made = Certificate(tmp_path / f"{name}.crt", tmp_path / f"{name}.key")
        subject = ["-subj", f"/CN={name}", "-addext", f"subjectAltName={of}"]
        secret = ["-nodes"] if passphrase is None else ["-passout", f"pass:{passphrase}"]
        curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
        files = ["-keyout", str(made.key), "-out", str(made.cert)]
        subprocess.run(
            ["openssl", "req", "-x509", "-days", "2", *curve, *secret, *subject, *files],
            check=True,
            capture_output=True,
        )
        return made

    return make


TOKEN = "0123456789abcdef-0123456789abcdef"


@pytest.fixture
def token_file(tmp_path):
    """A file with `TOKEN`."""
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    return file
