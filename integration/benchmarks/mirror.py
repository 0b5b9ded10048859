"""Additional cost of a put with the mirror, which reports its rows to TransferQueue's controller.

``python -m integration.benchmarks.mirror`` runs two stores, each with a separate Ray: one with
defaults, one with ``transfer_queue_mirror: false``. The rounds alternate between them. In a round a
store puts 32 rows repeatedly, as fast as it can; the rows are cleared after the round.
"""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import ExitStack

import torch
from integration.benchmarks.summary import Summary
from integration.benchmarks.systems.data_plane import config

from dataplane_tq import TQDataPlaneClient, start_local_ray

ROWS, PUTS, ROUNDS, WARM_UPS = 32, 200, 12, 2


def serve(*, mirrored: bool) -> None:
    """Time one round for each line of standard input."""
    start_local_ray(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    cfg = {**config("packed"), "global_segment_size": 64 << 20}
    columns = {"ids": torch.zeros(ROWS, 512, dtype=torch.int64), "advantages": torch.ones(ROWS)}
    with TQDataPlaneClient({**cfg, "transfer_queue_mirror": mirrored}) as client:
        client.register_partition("train", list(columns), ROWS * PUTS, ["train"])
        batches = [[f"{put}_{row}" for row in range(ROWS)] for put in range(PUTS)]
        print("ready", flush=True)
        for _ in sys.stdin:
            start = time.perf_counter()
            for ids in batches:
                client.put_columns(ids, "train", columns)
            print(time.perf_counter() - start, flush=True)
            client.clear_samples([name for ids in batches for name in ids], "train")


def main() -> None:
    with ExitStack() as stack:
        stores = {}
        for name in ("on", "off"):
            command = [sys.executable, "-m", "integration.benchmarks.mirror", name]
            stores[name] = stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
        pipes = {name: (store.stdin, store.stdout) for name, store in stores.items()}
        seconds: dict[str, list[float]] = {name: [] for name in stores}
        for _, answers in pipes.values():
            assert answers is not None
            answers.readline()
        for number in range(WARM_UPS + ROUNDS):
            # The order alternates, so that neither always runs during the other's clear.
            for name in sorted(stores, reverse=number % 2 == 0):
                requests, answers = pipes[name]
                assert requests is not None
                assert answers is not None
                requests.write("\n")
                requests.flush()
                duration = float(answers.readline())
                if number >= WARM_UPS:
                    seconds[name].append(duration / PUTS)
        for requests, _ in pipes.values():
            assert requests is not None
            requests.close()
    for name, durations in seconds.items():
        print(f"mirror {name}: {Summary.of(durations).value * 1000:.2f} ms a put of {ROWS} rows")
    ratios = Summary.of([on / off for on, off in zip(seconds["on"], seconds["off"], strict=True)])
    print(f"ratio {ratios.value:.2f} (IQR {ratios.spread:.2f}, {ROUNDS} rounds of {PUTS} puts)")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        serve(mirrored=sys.argv[1] == "on")
    else:
        main()
