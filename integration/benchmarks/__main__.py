"""``python -m integration.benchmarks``, from the root of the repository."""

from __future__ import annotations

# Processes that a benchmark spawns import this module again, but must not run it.
if __name__ == "__main__":
    from integration.benchmarks.cli import app

    app()
