"""`WatchedRun`: a tab with the page of a run, opened before the run and never reloaded."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

import pytest
from integration.waiting import wait_until
from playwright.sync_api import Locator, Page, expect

TIMEOUT_MS = 300_000
"""Time in which a run starts: it may load torch, Ray and vLLM first."""


class WatchedRun:
    """The page of the newest run.

    Args:
        tab: a tab of an admin service that has no run yet.
    """

    def __init__(self, tab: Page) -> None:
        self._tab = tab
        tab.goto("/run")
        expect(tab.locator("#run")).to_contain_text("No step metrics")
        tab.evaluate("window.kept = true")

    def follow(self, process: subprocess.Popen[bytes], curves: Sequence[str]) -> None:
        """Check that the page shows state, a step and curves while the run's process lives.

        Args:
            process: process of the run.
            curves: metrics of which the page must draw curves.
        """
        self.check_running(curves, steps=1)
        assert process.poll() is None, "the run ended before the page showed its steps"

    def check_running(self, curves: Sequence[str], *, steps: int = 0) -> None:
        """Check that the page shows a running run with ``curves`` and that many steps or more."""
        expect(self._fact("State")).to_contain_text("running", timeout=TIMEOUT_MS)
        for name in curves:
            expect(self._curve(name).locator("canvas")).to_be_visible(timeout=TIMEOUT_MS)
        wait_until(lambda: self._steps() >= steps, TIMEOUT_MS / 1000)

    def finish(self, *, steps: int, values: Mapping[str, float] | None = None) -> None:
        """Check the page after the end of the run.

        Args:
            steps: number of its finished steps.
            values: newest values of some of its curves.
        """
        expect(self._fact("State")).to_contain_text("finished", timeout=TIMEOUT_MS)
        wait_until(lambda: self._steps() == steps, 60)
        expected = pytest.approx(values or {}, rel=1e-3)
        wait_until(lambda: {name: self._newest(name) for name in values or {}} == expected, 60)
        assert self._tab.evaluate("window.kept"), "the page was reloaded"
        self._fact("Slowest").get_by_role("link").click()
        expect(self._tab.locator("#chart")).to_be_visible()
        expect(self._tab.get_by_role("heading", name="Critical path")).to_be_visible()

    def _steps(self) -> int:
        shown = self._fact("Steps")
        return int(shown.inner_text().split()[0].replace(",", "")) if shown.count() else 0

    def _curve(self, name: str) -> Locator:
        return self._tab.locator(f"figure[data-curve='{name}']").first

    def _newest(self, name: str) -> float:
        return float(self._curve(name).locator("output").inner_text())

    def _fact(self, name: str) -> Locator:
        return self._tab.locator("#run dl.facts > div").filter(has_text=name).locator("dd").first
