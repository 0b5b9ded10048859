"""The growth benchmark: what it computes, and that its clients stay light."""

from __future__ import annotations

import subprocess
import sys

import pytest
from integration.benchmarks.growth_client import Done
from integration.benchmarks.growth_clients import bottleneck, round_of
from integration.benchmarks.growth_rows import Partition, RowsResult


def test_light_clients_import_neither_torch_nor_ray():
    program = (
        "import sys, integration.benchmarks.growth_client; "
        "print({'torch', 'ray', 'tensordict', 'transfer_queue'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("directory", "units", "clients", "machine", "bound"),
    [
        (0.95, 0.1, 0.9, 2.0, "directory"),  # its thread is busy, whatever else is
        (0.7, 0.3, 0.9, 1.95, "all cores"),
        (0.7, 0.1, 0.4, 1.95, "other load"),
        (0.5, 0.0, 0.4, 1.0, "round trips"),
    ],
)
def test_bottleneck_has_no_idle_cores(directory, units, clients, machine, bound):
    cores = {"directory": directory, "units": units, "clients": clients, "machine": machine}
    assert bottleneck(cores, 2) == bound


def test_round_counts_operations_and_cores_per_second():
    done = [Done({"cycle": [0.2, 0.3]}, 0.5, 9), Done({"cycle": [0.4]}, 1.0, 6)]
    result = round_of(done, {"directory": 1.5, "units": 0.0}, 1.5, 2.0)
    assert result.rate == 10.0
    assert result.cycle_s == [0.2, 0.3, 0.4]
    assert result.cores == {"directory": 0.75, "units": 0.0, "clients": 0.75}


def test_ratio_is_to_the_smallest_partition_among_others():
    alone, small, large = (
        Partition("alone", 1_000, alone=True),
        Partition("small", 1_000),
        Partition("large", 100_000),
    )
    seconds = {alone: [5.0] * 3, small: [1.0, 2.0, 4.0], large: [3.0, 4.0, 8.0]}
    result = RowsResult(
        {partition: {"put": values} for partition, values in seconds.items()},
        added_bytes={small: 10**6, large: 5 * 10**7},
    )
    ratio = result.ratio(large, "put")
    assert (ratio.value, ratio.count) == (2.0, 3)
    assert ratio.spread == pytest.approx(0.5)  # quartiles 2 and 2.5 of the ratios 3, 2 and 2
    assert result.bytes_per_row(large) == 500
    assert result.bytes_per_row(small) is None
