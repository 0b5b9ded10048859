"""Cost of the journal of an asynchronous run, as a share of the put that it precedes.

``python -m integration.benchmarks.journal`` has rounds for each length of the responses. A round
puts a group of 16 samples as a generator does. Then it reads the rollout's columns back and appends
them, with the advantages, to a `Journal` in a temporary folder. The duration of a put is the sum of
two: of the rollout's columns, and of the advantages.

Imports internals: a run reports the time of its journal by step, not by put.
"""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path
from typing import Any  # Any: columns

import torch
from integration.benchmarks.cluster import ray_cluster
from integration.benchmarks.report import markdown_table
from integration.benchmarks.results_file import Entry, merge_entries
from integration.benchmarks.summary import Summary
from integration.benchmarks.systems.data_plane import config
from rich.console import Console

from dataplane_tq import TQDataPlaneClient
from grpo_trainer.rollout.journal import FinishedGroup, Journal

HEADINGS = ["tokens of a sample", "put, ms", "journal, ms", "journal / put (IQR)", "bytes written"]
SEED = 20_263
ROWS, LENGTHS, ROUNDS, WARM_UPS = 16, (256, 1_024, 4_096), 40, 5
_PARTITION = "train"
_TOKENS = {
    "input_ids": torch.int64,
    "token_mask": torch.int64,
    "generation_logprobs": torch.float32,
}
_NUMBERS = {"input_lengths": torch.int64, "total_reward": torch.float32}
_ADVANTAGES = ("advantages", "sample_mask")


def measure(
    client: TQDataPlaneClient, journal: Journal, length: int
) -> tuple[list[str], list[Entry]]:
    """Return a row for a table with `HEADINGS`, and entries for the file of results."""
    columns: dict[str, Any] = {
        **{name: torch.ones((ROWS, length), dtype=dtype) for name, dtype in _TOKENS.items()},
        **{name: torch.ones(ROWS, dtype=dtype) for name, dtype in _NUMBERS.items()},
    }
    advantages = {name: torch.ones(ROWS) for name in _ADVANTAGES}
    lengths = [length] * ROWS
    puts, records = [], []
    written = 0
    for number in range(WARM_UPS + ROUNDS):
        ids = [f"{length}_{number}_{row}" for row in range(ROWS)]
        begun = time.perf_counter()
        client.put_columns(ids, _PARTITION, columns, lengths=lengths, ragged=[*_TOKENS])
        between = time.perf_counter()
        stored = client.get_columns(ids, _PARTITION, [*columns])
        group = FinishedGroup(number, 0, [1.0] * ROWS, {**stored, **advantages})
        written = journal.append(group)
        recorded = time.perf_counter()
        client.put_columns(ids, _PARTITION, advantages)
        end = time.perf_counter()
        client.clear_samples(ids, _PARTITION)
        if number >= WARM_UPS:
            puts.append(between - begun + end - recorded)
            records.append(recorded - between)
    share = Summary.of_ratio(records, puts)
    row = [
        f"{length:,}",
        f"{1_000 * Summary.of(puts).value:.2f}",
        f"{1_000 * Summary.of(records).value:.2f}",
        f"{share.value:.2f} ({share.spread:.2f})",
        f"{written:,}",
    ]
    name = f"journal.{length}"
    return row, [
        Entry.ms(f"{name}.ms", Summary.of(records)),
        Entry(f"{name}.kb", written / 1_000, "kB", None, 0.0, 1),
        Entry.of(f"{name}.ratio_vs_put", share, "x", baseline="put"),
    ]


def main() -> None:
    """Print the table, and merge its results into ``build/bench.json``."""
    with (
        ray_cluster(full=False),
        TQDataPlaneClient(config("packed"), bootstrap=True) as client,
        tempfile.TemporaryDirectory(prefix="bench-journal-") as folder,
    ):
        fields = [*_TOKENS, *_NUMBERS, *_ADVANTAGES]
        samples = ROWS * (WARM_UPS + ROUNDS) * len(LENGTHS)
        client.register_partition(_PARTITION, fields, samples, ["train"])
        journal = Journal(Path(folder))
        order = random.Random(SEED).sample(LENGTHS, len(LENGTHS))
        measured = {length: measure(client, journal, length) for length in order}
    merge_entries(
        Path("build/bench.json"), [e for _, entries in measured.values() for e in entries]
    )
    table = markdown_table("Journal", HEADINGS, [measured[length][0] for length in LENGTHS])
    Console(soft_wrap=True, highlight=False, markup=False).print(table)


if __name__ == "__main__":
    main()
