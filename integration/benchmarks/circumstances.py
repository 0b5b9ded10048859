"""Circumstances of a run: the machine, the versions, the seeds."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path

import psutil
from integration.benchmarks import (
    admin_ingest,
    admin_pages,
    async_grpo,
    growth_clients,
    growth_nodes,
    growth_rows,
    harness,
    refit,
    tracing,
)

CIRCUMSTANCES_HEADINGS = ["property", "value"]
_PACKAGES = (
    "dataplane-core",
    "dataplane-tq",
    "refit-mx",
    "observability",
    "torch",
    "tensordict",
    "ray",
    "TransferQueue",
    "nixl-cu12",
    "numpy",
)


def circumstances() -> list[list[str]]:
    """Return rows for a table with `CIRCUMSTANCES_HEADINGS`."""
    seeds = {
        "data plane": harness.SEED,
        "refit": refit.SEED,
        "tracing": tracing.SEED,
        "asynchronous GRPO": async_grpo.SEED,
        "ingested spans": admin_ingest.SEED,
        "pages": admin_pages.SEED,
        "growth, rows": growth_rows.SEED,
        "growth, clients and units": growth_clients.SEED,
        "growth, nodes": growth_nodes.SEED,
    }
    load = ", ".join(f"{average:.2f}" for average in os.getloadavg())
    return [
        ["processor", f"{_processor()}, {os.cpu_count()} cores"],
        ["memory", f"{psutil.virtual_memory().total / 2**30:.1f} GiB"],
        ["system", f"{platform.system()} {platform.release()}"],
        ["load before (1, 5, 15 min)", load],
        ["Python", platform.python_version()],
        *([name, version(name)] for name in _PACKAGES),
        *([f"seed, {area}", str(seed)] for area, seed in seeds.items()),
    ]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.machine()
