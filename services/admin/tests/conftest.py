"""Real processes of the service, ended by their id whatever the test did."""

import select
import subprocess
import sysconfig
import time
from pathlib import Path

import pytest

COMMAND = str(Path(sysconfig.get_path("scripts")) / "dataplane-admin")
PATIENCE_S = 30.0


class Service:
    """One process, and the URL that it printed."""

    def __init__(self, command):
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def wait_for_url(self):
        ready, _, _ = select.select([self.process.stdout], [], [], PATIENCE_S)
        assert ready, f"no line of output within {PATIENCE_S:g} s"
        self.url = self.process.stdout.readline().strip()
        assert self.url, self.process.stderr.read()
        return self

    @property
    def port(self):
        return int(self.url.rsplit(":", 1)[1])

    def stop(self, number):
        """Send a signal and wait; gives the status, the seconds it took, and what was written."""
        asked = time.monotonic()
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, time.monotonic() - asked, out + err


@pytest.fixture
def start():
    services = []

    def start_service(*arguments, command=(COMMAND, "serve", "--port", "0")):
        services.append(Service([*command, *arguments]))
        return services[-1].wait_for_url()

    yield start_service
    for service in services:
        service.process.kill()
        service.process.communicate()


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
