"""Processors, memory and GPUs of this node, under the names of OpenTelemetry's conventions.

https://opentelemetry.io/docs/specs/semconv/system/system-metrics/ and .../hardware/gpu/. psutil
reads /proc also inside of a container; NVML is what nvidia-smi reads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import psutil

from dataplane_admin.scrape.reading import Reading

try:
    import pynvml  # module of nvidia-ml-py; without the driver, its calls fail
except ModuleNotFoundError:  # the node has no GPU to report
    pynvml = None

_MODES = {
    "user": "user",
    "nice": "nice",
    "system": "system",
    "idle": "idle",
    "iowait": "iowait",
    "irq": "interrupt",
    "softirq": "softirq",
    "steal": "steal",
}  # `guest` is part of `user`


class Node:
    """Reader of this node."""

    def __init__(self) -> None:
        self._has_nvml = False
        if pynvml is not None:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlInit()
                self._has_nvml = True

    def read(self) -> list[Reading]:
        """Return the metrics of this node."""
        times = psutil.cpu_times()._asdict()
        memory = psutil.virtual_memory()
        # The kernel's cache is available: it is released on demand.
        states = {"used": memory.total - memory.available, "free": memory.available}
        return [
            *(
                Reading("system.cpu.time", times[field], {"cpu.mode": mode})
                for field, mode in _MODES.items()
                if field in times
            ),
            *(
                Reading("system.memory.usage", float(value), {"system.memory.state": state})
                for state, value in states.items()
            ),
            *self._gpus(),
        ]

    def _gpus(self) -> Iterator[Reading]:
        if not self._has_nvml:
            return
        count = 0
        with contextlib.suppress(pynvml.NVMLError):  # the driver may have been reloaded
            count = pynvml.nvmlDeviceGetCount()
        for index in range(count):
            attributes = {"hw.id": str(index)}
            # A partitioned or lost GPU has no utilization.
            with contextlib.suppress(pynvml.NVMLError):
                device = pynvml.nvmlDeviceGetHandleByIndex(index)
                memory = pynvml.nvmlDeviceGetMemoryInfo(device)
                yield Reading("hw.gpu.memory.usage", float(memory.used), attributes)
                yield Reading("hw.gpu.memory.limit", float(memory.total), attributes)
                share = pynvml.nvmlDeviceGetUtilizationRates(device).gpu / 100
                yield Reading("hw.gpu.utilization", share, attributes)
