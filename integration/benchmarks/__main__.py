"""``python -m integration.benchmarks``, from the root of the repository."""

from __future__ import annotations

from integration.benchmarks.cli import app

app()
