"""The pages over a made-up run: in this process, and served to a real Chromium."""

import asyncio
import shutil
import sys
import threading
from pathlib import Path

import pytest
import uvicorn
from fastapi import FastAPI
from fastapi.testclient import TestClient
from playwright.sync_api import sync_playwright
from starlette.responses import StreamingResponse

# Tests are imported by path, so the module they share has to be found.
sys.path.insert(0, str(Path(__file__).parent))

from made_up_run import MadeUpAnswers

from dataplane_admin.access import AccessMiddleware
from dataplane_admin.csrf import CsrfMiddleware
from dataplane_admin.failed_logins import FailedLogins
from dataplane_admin.login import Sessions
from dataplane_admin.pages import router
from dataplane_admin.security_headers import SecurityHeadersMiddleware
from dataplane_admin.settings import Settings

PATIENCE_S = 20.0


class Site:
    """The pages with the layers around them that they rely on, and a stream of changes."""

    def __init__(self, **told):
        empty = told.pop("empty", False)
        self.settings = Settings(
            store_url="sqlite://", jaeger_url="http://jaeger.example:16686", **told
        )
        self.answers = MadeUpAnswers(self.settings, empty=empty)
        self.app = FastAPI(openapi_url=None)
        self.app.include_router(router(self.answers, self.settings))
        self.app.add_api_route("/api/v1/live", self._live)
        self.app.add_middleware(CsrfMiddleware)
        self.app.add_middleware(
            AccessMiddleware,
            token=self.settings.token,
            sessions=Sessions(),
            failed=FailedLogins(0.0),
        )
        self.app.add_middleware(SecurityHeadersMiddleware)
        self.url = ""
        self.ending = False

    def change(self):
        """Something happens that the pages show."""
        self.answers.tick += 1

    async def _live(self):
        async def told():
            seen = -1
            yield b"retry: 500\n\n"
            while not self.ending:
                if seen != self.answers.tick:
                    if seen >= 0:
                        yield b'event: changed\ndata: {"store": 1, "live": 1}\n\n'
                    seen = self.answers.tick
                await asyncio.sleep(0.02)

        return StreamingResponse(told(), media_type="text/event-stream")


# Of a module each: playwright keeps an event loop in the thread of the tests as long as it lives.
@pytest.fixture(scope="module")
def site():
    return Site(allow_actions=True)


@pytest.fixture(scope="module")
def client(site):
    return TestClient(site.app, base_url="http://localhost")


@pytest.fixture(scope="module")
def bare_client():
    """Of a service that nothing has reached yet."""
    return TestClient(Site(empty=True).app, base_url="http://localhost")


@pytest.fixture(scope="module")
def served(site):
    server = uvicorn.Server(uvicorn.Config(site.app, port=0, log_level="warning", ws="none"))
    thread = threading.Thread(target=server.run)
    thread.start()
    deadline = threading.Event()
    for _ in range(int(PATIENCE_S / 0.01)):
        if server.started:
            break
        deadline.wait(0.01)
    assert server.started
    port = server.servers[0].sockets[0].getsockname()[1]
    site.url = f"http://127.0.0.1:{port}"
    yield site
    site.ending = True
    server.should_exit = True
    thread.join(PATIENCE_S)


@pytest.fixture(scope="module")
def browser():
    found = shutil.which("chromium")
    if found is None:
        pytest.fail("no chromium; `apt-get install chromium`, as .ci/run does")
    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    flags += ["--disable-component-update", "--disable-sync"]
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=found, args=flags)
        yield started
        started.close()
