"""A process that runs one publisher after another, and control planes that can be killed."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import signal
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ports import held_port
from refit_processes import Process


class Control:
    """A control plane in a process; after a kill it restarts with its port and its state.

    Args:
        stack: exit stack that closes it.
        folder: folder of its state.
        retention: retention of the control plane.
    """

    def __init__(self, stack: ExitStack, folder: Path, *, retention: int) -> None:
        self._settings = {
            "port": stack.enter_context(held_port()),
            "state": str(folder / f"control-{retention}-{secrets.token_hex(4)}"),
            "retention": retention,
        }
        self._process = Process("control", **self._settings)
        self.address = str(self._process.ready["address"])
        stack.callback(lambda: self._process.close())

    def signal(self, number: signal.Signals) -> None:
        """Send SIGKILL or SIGSTOP."""
        self._process.signal(number)

    def recover(self, number: signal.Signals) -> None:
        """Continue the process after SIGSTOP; restart it with its state after SIGKILL."""
        if number == signal.SIGSTOP:
            self._process.signal(signal.SIGCONT)
            return
        self._process.close()
        self._process = Process("control", **self._settings)

    @property
    def leases(self) -> int:
        """Number of leases held now."""
        count: int = self._process.ask(do="count")["leases"]
        return count


def open_files(without: Iterable[int] = ()) -> list[str]:
    """Return the target of each open file of this process, except the descriptors ``without``."""
    targets = []
    for name in {*os.listdir("/proc/self/fd")} - {*map(str, without)}:
        with contextlib.suppress(OSError):  # the descriptor of the listing is closed by now
            targets.append(os.readlink(f"/proc/self/fd/{name}"))
    return sorted(targets)


# Code that runs in the other processes


class Publishing:
    """The commands of a publisher process, one method each."""

    def __init__(self) -> None:
        self._publisher: Any = None
        self._settings: dict[str, Any] = {}
        self._manifests: dict[str, tuple[Any, list[Any]]] = {}

    def open(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Become a publisher."""
        from refit_mx import MxV2TrainingPublisher

        self._settings = settings
        self._manifests.clear()
        self._publisher = MxV2TrainingPublisher(
            settings["model"],
            settings["slot"],
            control=settings["control"],
            transports=settings["transports"],
            wire_dtype=settings["wire"],
            heartbeat_ttl_s=60,
        )
        return {}

    def publish(self, version: str, timeout_s: float) -> dict[str, Any]:
        import torch
        from soak_model import Drawn, numbers

        from refit_mx import Box, LocalShard

        model = {
            name: Drawn(dtype, tuple(shape), wire)
            for name, (dtype, shape, wire) in self._settings["tensors"].items()
        }
        tensors = numbers(self._settings["seed"], version, model)
        shards = []
        for name, (start, shape) in self._settings["held"]:
            box = Box(tuple(start), tuple(shape))
            part = torch.from_numpy(tensors[name])[box.slices()]
            shards.append(LocalShard(name, model[name].shape, box, part))
        manifest = self._publisher.publish(version, shards, timeout_s=timeout_s)
        self._manifests[version] = (manifest, shards)
        return {}

    def flip(self, version: str, name: str, at: list[int], byte: int, bit: int) -> dict[str, Any]:
        """Flip one bit of an element in the arena, like failing memory; a second call undoes it."""
        import numpy as np

        manifest, shards = self._manifests[version]
        offsets = np.frombuffer(manifest.shards.offset, "<i8").tolist()
        for shard, offset in zip(shards, offsets, strict=True):
            if shard.name != name:
                continue
            place = [a - first for a, first in zip(at, shard.box.start, strict=True)]
            if any(not 0 <= i < n for i, n in zip(place, shard.box.shape, strict=True)):
                continue
            item_size = self._settings["item_sizes"][name]
            flat = int(np.ravel_multi_index(place, shard.box.shape)) if place else 0
            address = manifest.arena_address + offset + flat * item_size + byte
            ctypes.c_uint8.from_address(address).value ^= 1 << bit
            return {}
        raise AssertionError(f"{name} {at} is not held")

    def close(self) -> dict[str, Any]:
        """Close the publisher; return the open files."""
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None
        return {"descriptors": open_files()}
