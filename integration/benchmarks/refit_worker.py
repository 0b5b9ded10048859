"""`RefitWorker`: a trainer or a generator of the refit benchmark, a Ray actor that hosts every way.

The clock starts and stops here. All processes are on one machine, so they share a monotonic clock.
A step of several processes lasts from the first start to the last end. Imports internals: raw NIXL
is configured as refit-mx configures it.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any  # Any: references and tensors of one way, and NIXL's handles

import numpy as np
import ray
import torch
import torch.distributed as dist
from integration.benchmarks.refit_cases import RefitCase
from safetensors import safe_open
from safetensors.torch import save_file

from refit_mx import (
    LocalShard,
    MxV2RefitReceiver,
    MxV2TrainingPublisher,
    ReceiverSettings,
)
from refit_mx.transports.nixl_library import new_agent
from refit_mx.transports.nixl_source import NixlSource

_TIMEOUT_S = 120.0


@dataclass
class Timing:
    """Start and end of one process's step of one way.

    Attributes:
        start: start on the monotonic clock, in seconds.
        end: end on the monotonic clock, in seconds.
        stages: stage to its seconds, if the way has stages.
    """

    start: float
    end: float
    stages: dict[str, float] = field(default_factory=dict)


MODEL = "bench"
"""Name of the model in the control plane."""


class RefitWorker:
    """Process of a trainer or a generator.

    Args:
        case: the model and its layouts.
        rank: rank among the sources or among the targets.
        source: whether it is a source.
    """

    def __init__(self, case: RefitCase, rank: int, *, source: bool) -> None:
        torch.set_num_threads(1)
        self._case, self._rank, self._source = case, rank, source
        self._shards: list[LocalShard] = case.shards(rank) if source else []
        self._targets = [] if source else case.targets(rank)
        self._live = {t.name: torch.empty(t.shape, dtype=torch.bfloat16) for t in self._targets}
        self._publisher: MxV2TrainingPublisher | None = None
        self._receivers: dict[str, MxV2RefitReceiver] = {}
        self._raw: Any = None
        self._buffer = torch.zeros(0, dtype=torch.uint8)

    def ready(self) -> None:
        """Do nothing: the answer shows that the tensors are built."""

    # refit-mx

    def join(self, control: str, transports: list[str]) -> None:
        """Create a publisher with default transports, or one receiver per transport."""
        if self._source:
            self._publisher = MxV2TrainingPublisher(
                MODEL, f"s{self._rank}", control=control, cuts=self._case.cuts
            )
            return
        for name in transports:
            self._receivers[name] = MxV2RefitReceiver(
                MODEL,
                control=control,
                targets=self._targets,
                transport=name,
                rank=self._rank,
                settings=ReceiverSettings(scratch_copies=1),
            )

    def publish(self, version_id: str) -> Timing:
        """Copy, compute digests, announce."""
        assert self._publisher is not None
        with _timed() as timing:
            self._publisher.publish(version_id, self._shards)
        return timing

    def receive(self, version_id: str, transport: str) -> Timing:
        """Lease, discover, plan, fetch, verify."""
        with _timed() as timing:
            received = self._receivers[transport].receive_weights_scratch(
                version_id, timeout_s=_TIMEOUT_S
            )
        timing.stages = dict(received.stats.seconds)
        assert received.stats.nbytes == self._case.target_bytes(self._rank)
        received.close()
        return timing

    def check(self, version_id: str, transport: str) -> None:
        """Compare the received tensors with the sources', byte for byte.

        Raises:
            AssertionError: a tensor differs.
        """
        with self._receivers[transport].receive_weights_scratch(version_id) as received:
            for name, expected in self._case.expected(self._rank):
                if not torch.equal(received[name].view(torch.int16), expected.view(torch.int16)):
                    raise AssertionError(f"{transport}: {name} is not what was published")

    # NIXL without refit-mx in the timed part

    def register_raw(self) -> Any:
        """Register one buffer as large as the shards; return its registration and address."""
        self._raw = NixlSource()
        self._buffer = torch.ones(self._case.source_bytes(self._rank), dtype=torch.uint8)
        return self._raw.register(self._buffer), self._buffer.data_ptr()

    def prepare_raw(self, buffers: list[Any]) -> None:
        """Prepare reads of each trainer's buffer, in one transfer per source, in two variants.

        The first executes the reads of a refit, the second one long read of as many bytes.
        """
        agent = new_agent("raw", serves=False)
        self._buffer = torch.zeros(self._case.target_bytes(self._rank), dtype=torch.uint8)
        agent.register_memory([self._buffer])
        short, long = [], []
        at = 0
        for rank, (registered, address) in enumerate(buffers):
            to, origin, sizes = self._case.ranges(rank, self._rank)
            if not len(sizes):
                continue
            name = agent.add_remote_agent(registered.metadata)

            def prepared(
                to: Any, origin: Any, sizes: Any, name: str = name, address: int = address
            ) -> Any:
                device = np.zeros_like(sizes)
                local = np.stack([to + self._buffer.data_ptr(), sizes, device], axis=1)
                remote = np.stack([origin + address, sizes, device], axis=1)
                described = [agent.get_xfer_descs(side, "DRAM") for side in (local, remote)]
                return agent.initialize_xfer("READ", *described, name, b"")

            short.append(prepared(to, origin, sizes))
            total = np.array([int(sizes.sum())])
            long.append(prepared(np.array([at]), np.array([0]), total))
            at += int(total[0])
        self._raw = agent, short, long

    def read_raw(self, long: bool) -> Timing:
        """Read from all trainers, in the reads of a refit or in long reads."""
        agent, *prepared = self._raw
        handles = prepared[long]
        with _timed() as timing:
            for handle in handles:
                agent.transfer(handle)
            waiting = list(handles)
            while waiting:
                states = [(handle, agent.check_xfer_state(handle)) for handle in waiting]
                if any(state == "ERR" for _, state in states):
                    raise RuntimeError("a raw NIXL read failed")
                waiting = [handle for handle, state in states if state != "DONE"]
        return timing

    # Gloo

    def join_gloo(self, init_method: str, rank: int, world: int) -> None:
        """Join the process group."""
        dist.init_process_group(
            "gloo",
            init_method=init_method,
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=_TIMEOUT_S),
        )

    def broadcast(self) -> Timing:
        """Broadcast every source's shards to all processes, one tensor at a time."""
        with _timed() as timing:
            for source in range(self._case.sources):
                own = self._source and source == self._rank
                for index, size in enumerate(self._case.shard_elements(source)):
                    tensor = self._shards[index].tensor.reshape(-1) if own else self._landing(size)
                    dist.broadcast(tensor, source)
        return timing

    def _landing(self, elements: int) -> torch.Tensor:
        if self._buffer.nbytes < 2 * elements:
            self._buffer = torch.zeros(2 * elements, dtype=torch.uint8)
        return self._buffer[: 2 * elements].view(torch.bfloat16)

    # Ray's object store

    def put_ray(self) -> tuple[Timing, list[Any]]:
        """Put every shard; return the references too."""
        with _timed() as timing:
            references = [ray.put(shard.tensor.view(torch.int16).numpy()) for shard in self._shards]
        return timing, references

    def get_ray(self, references: list[list[Any]]) -> Timing:
        """Get every shard and copy the needed part."""
        with _timed() as timing:
            for source, shards in enumerate(references):
                self._assemble(source, lambda index, shards=shards: ray.get(shards[index]))
        return timing

    # A file in memory

    def save_file(self, folder: str) -> Timing:
        """Save the shards."""
        path = Path(folder) / f"{self._rank}.safetensors"
        with _timed() as timing:
            save_file({shard.name: shard.tensor for shard in self._shards}, path)
        return timing

    def load_file(self, folder: str) -> Timing:
        """Load the needed parts."""
        with _timed() as timing:
            for source in range(self._case.sources):
                path = Path(folder) / f"{source}.safetensors"
                with safe_open(path, framework="pt") as file:
                    for name, here, there in self._case.slices(source, self._rank):
                        self._live[name][here] = file.get_slice(name)[there]
        return timing

    def _assemble(self, source: int, shard: Callable[[int], np.ndarray[Any, Any]]) -> None:
        names = self._case.names
        for name, here, there in self._case.slices(source, self._rank):
            self._live[name].view(torch.int16).numpy()[here] = shard(names.index(name))[there]

    # Memory

    def copy(self) -> Timing:
        """Copy as many bytes as this target needs, within its own memory."""
        nbytes = self._case.target_bytes(self._rank)
        if self._buffer.nbytes < nbytes:
            self._buffer = torch.zeros(nbytes, dtype=torch.uint8)
        flat = [live.reshape(-1).view(torch.uint8) for live in self._live.values()]
        with _timed() as timing:
            at = 0
            for live in flat:
                self._buffer[at : at + live.nbytes].copy_(live)
                at += live.nbytes
        return timing

    def close(self) -> None:
        """Close the publisher, the receivers and the process group."""
        if self._publisher is not None:
            self._publisher.close()
        for receiver in self._receivers.values():
            receiver.close()
        if dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def _timed() -> Iterator[Timing]:
    timing = Timing(time.monotonic(), 0.0)
    yield timing
    timing.end = time.monotonic()


def total_seconds(timings: list[Timing]) -> float:
    """Return the seconds from the first start to the last end."""
    return max(each.end for each in timings) - min(each.start for each in timings)
