"""Bytes that a demo step takes in the admin service's SQLite database, by table.

``python -m integration.benchmarks.store_size``: a synchronous and then an asynchronous run of the
demo report to a service with an empty database, with the texts and tokens of some samples. Bytes of
a table are the size of its pages and indexes after the run, minus that before it.
"""

from __future__ import annotations

import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer
from integration.admin_demo import LOG, served_run
from integration.benchmarks.report import markdown_table
from rich.console import Console

HEADINGS = ["table, bytes a step", "sync", "async"]
TEXTS_TABLE = "sample_texts"
_STEPS_A_DAY = 24 * 60
_BYTES = """
    SELECT tbl_name, SUM(pgsize) FROM dbstat JOIN sqlite_master USING (name) GROUP BY tbl_name
"""


def measure(mode: str, steps: int, texts: int) -> dict[str, float]:
    """Return the bytes of a step by table.

    Args:
        mode: ``sync`` or ``async``.
        steps: steps of the run.
        texts: samples of a step whose text is stored.

    Raises:
        RuntimeError: the service did not start, or the run failed.
    """
    changes = (
        f"grpo.mode={mode}",
        f"grpo.num_steps={steps}",
        f"tracing.sample_texts={texts}",
        "grpo.dynamic_sampling.enabled=false",  # else some steps generate twice
        "validation.every_steps=0",
        "checkpointing.every_steps=0",
    )
    with tempfile.TemporaryDirectory(prefix="bench-store-") as name:
        folder = Path(name)
        with served_run(folder, changes, ["--keep-sample-text"]) as started:
            empty = started and _bytes_by_table(folder)
            if not started or started[2].wait():
                raise RuntimeError((folder / LOG).read_text()[-2_000:])
            full = _bytes_by_table(folder)
    return {table: (full[table] - empty[table]) / steps for table in full}


def _bytes_by_table(folder: Path) -> dict[str, int]:
    with closing(sqlite3.connect(folder / "admin.sqlite")) as connection:
        return dict(connection.execute(_BYTES).fetchall())


def store_size(
    steps: Annotated[int, typer.Option(min=1, help="Steps of each run.")] = 40,
    texts: Annotated[int, typer.Option(min=0, help="Samples a step with stored text.")] = 16,
) -> None:
    """Print the bytes that a demo step of 512 samples takes in SQLite."""
    runs = [measure(mode, steps, texts) for mode in ("sync", "async")]
    without = [sum(run.values()) - run[TEXTS_TABLE] for run in runs]
    with_texts = [sum(run.values()) for run in runs]
    lines = {
        table: [run[table] for run in runs] for table in runs[0] if any(r[table] for r in runs)
    }
    lines = dict(sorted(lines.items(), key=lambda line: -line[1][0]))
    lines |= {"all but texts": without, f"with {texts} texts": with_texts}
    rows = [[name, *(f"{number:,.0f}" for number in numbers)] for name, numbers in lines.items()]
    for title, numbers in (("without texts", without), (f"with {texts} texts", with_texts)):
        gigabytes = [f"{number * _STEPS_A_DAY / 1e9:.2f} GB" for number in numbers]
        rows.append([f"a day at a step a minute, {title}", *gigabytes])
    table = markdown_table("Store of the admin service", HEADINGS, rows)
    Console(soft_wrap=True, highlight=False, markup=False).print(table)


if __name__ == "__main__":
    typer.run(store_size)
