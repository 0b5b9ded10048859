"""Real processes of the service, ended by their id whatever happens, and applications of it."""

import json
import select
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest
from hypothesis import settings

from dataplane_admin import Settings, create_app

COMMAND = str(Path(sysconfig.get_path("scripts")) / "dataplane-admin")
PATIENCE_S = 60.0
TOKEN = "3f2b8c0d9e7a6b5c"


class Service:
    """One process, and the URL that it printed."""

    def __init__(self, command, folder):
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder
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
def start(tmp_path):
    """Start the service, or another command that prints a URL; its files are the test's."""
    services = []

    def start_service(*arguments, command=(COMMAND, "serve", "--port", "0")):
        services.append(Service([*command, *arguments], tmp_path))
        return services[-1].wait_for_url()

    yield start_service
    for service in services:
        service.process.kill()
        service.process.communicate()


@pytest.fixture
def refused(tmp_path):
    """Run the command, which must end by itself; gives its status and what it wrote to stderr."""

    def run(*arguments):
        done = subprocess.run(
            [COMMAND, "serve", *arguments],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
            cwd=tmp_path,
        )
        assert done.stdout == ""
        return done.returncode, done.stderr

    return run


@pytest.fixture
def make_app(tmp_path):
    """Make applications on one file, which are closed at the end; takes what `Settings` takes."""
    made = []

    def make(*, inspector=None, **settings):
        settings.setdefault("store_url", f"sqlite:///{tmp_path / 'admin.sqlite'}")
        settings.setdefault("failed_login_delay_s", 0.0)
        made.append(create_app(Settings(**settings), inspector=inspector))
        return made[-1]

    yield make
    for app in made:
        app.state.store.close()


@pytest.fixture(scope="session")
def app_of(tmp_path_factory):
    """The application of some settings, made once: for tests that leave it as it was."""
    made = {}

    def app(**settings):
        place = repr(sorted(settings.items()))
        if place not in made:
            path = tmp_path_factory.mktemp("admin") / "admin.sqlite"
            settings.setdefault("failed_login_delay_s", 0.0)
            made[place] = create_app(Settings(store_url=f"sqlite:///{path}", **settings))
        return made[place]

    yield app
    for one in made.values():
        one.state.store.close()


@pytest.fixture(scope="session")
def start_running(tmp_path_factory):
    """Start services with a data plane and a traced run, see running.py, which take `Settings`."""
    services = []

    def start(**settings):
        folder = tmp_path_factory.mktemp("running")
        command = [sys.executable, str(Path(__file__).with_name("running.py"))]
        settings = {"store_url": f"sqlite:///{folder}/admin.sqlite", **settings}
        services.append(Service([*command, json.dumps(settings)], folder))
        return services[-1].wait_for_url()

    yield start
    for service in services:
        service.process.kill()
        service.process.communicate()


@pytest.fixture(scope="session")
def running(start_running):
    """A service with a data plane and a traced run; for tests that only look."""
    return start_running(token=TOKEN, allow_actions=True)


# How long an example takes depends on what else the machine does.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
