"""Fixtures: ``dataplane-admin serve``, which inspects the module's Ray, and a Chromium."""

from __future__ import annotations

import json
import shutil
import subprocess
import sysconfig
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import ray
from integration.waiting import wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ADMIN = Path(sysconfig.get_path("scripts")) / "dataplane-admin"
TIMEOUT_S = 60.0


class Admin:
    """A client of the admin service's API."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, path: str, **query: object) -> Any:
        """Return the answer of an API path."""
        parameters = urllib.parse.urlencode(query)
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{parameters}", timeout=30) as answer:
            return json.load(answer)

    def until(self, condition: Callable[[], Any]) -> Any:
        """Call ``condition`` until it returns a true value, and return that value."""
        return wait_until(condition, TIMEOUT_S, state=lambda: self.ask("status"))

    def until_curves(self, run: str, names: Iterable[str], *, min_points: int) -> None:
        """Wait until the run has a curve of each metric with ``min_points`` points or more."""

        def missing() -> list[str]:
            curves = self.ask("runs/curves", run=run)["curves"]
            return sorted(
                set(names) - {each["name"] for each in curves if each["points"] >= min_points}
            )

        wait_until(lambda: not missing(), TIMEOUT_S, state=missing)

    def check_alerts(self, run: str) -> None:
        """Check that no alert was raised, and that no curve exceeds the bound of a shipped rule."""
        # Imported here: other environments collect these fixtures without it.
        from dataplane_admin import load_rules

        alerts = self.ask("alerts")
        assert alerts["evaluated_ns"]
        assert alerts["raised"] == alerts["cleared"] == []
        bounds = {f"rl.{rule.kind}.mean": rule.bound for rule in load_rules().rules}
        for curve in self.ask("runs/curves", run=run)["curves"]:
            if (name := curve["name"]) in bounds:
                assert max(curve["values"]) <= bounds[name], name


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[Admin]:
    """Run ``dataplane-admin serve`` in ``folder`` during the block."""
    serve = [str(ADMIN), "serve", "--port", "0", *options]
    with (folder / "log").open("wb") as log:
        service = subprocess.Popen(serve, cwd=folder, stdout=subprocess.PIPE, stderr=log)
        assert service.stdout is not None
        try:
            url = service.stdout.readline().decode().strip()
            assert url, (folder / "log").read_text()
            yield Admin(url)
            service.terminate()
            assert service.wait(30) == 0, (folder / "log").read_text()
        finally:
            service.kill()
            service.wait()


@contextmanager
def quiet_tab(browser: Browser, url: str) -> Iterator[Page]:
    """Open a tab during the block; afterwards fail on any console message or page error."""
    complaints: list[str] = []
    tab = browser.new_page(viewport={"width": 1280, "height": 900}, base_url=url)
    tab.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    yield tab
    tab.close()
    assert complaints == []


@pytest.fixture(scope="module")
def admin(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Admin]:
    """Run ``dataplane-admin serve``, which inspects the cluster."""
    address = ray.get_runtime_context().gcs_address
    options = ["--ray-address", address, "--poll-s", "0.1", "--keep-sample-text"]
    with serving(tmp_path_factory.mktemp("admin"), *options) as admin:
        yield admin


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    # Imported here: other environments collect these fixtures without it.
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium")
    assert chromium, "these tests drive Debian's package chromium, which is not installed"
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        started = playwright.chromium.launch(executable_path=chromium, args=arguments)
        yield started
        started.close()
