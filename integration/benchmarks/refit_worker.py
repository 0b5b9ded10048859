"""`RefitWorker`: a trainer or a generator of the refit benchmark, a Ray actor that hosts every way.

The clock starts and stops in here. All processes are on one machine, so their monotonic clocks are
one, and what several of them do together lasts from the first beginning to the last end.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
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
class Took:
    """What one process did for one step of one way.

    Attributes:
        began: of the monotonic clock, in seconds.
        ended: the same.
        stages: seconds by name, where the way has stages.
    """

    began: float
    ended: float
    stages: dict[str, float] = field(default_factory=dict)


MODEL = "bench"
"""As the control plane knows what is published."""


class RefitWorker:
    """One process.

    Args:
        case: what moves.
        rank: among the sources, or among the targets.
        source: whether it is one of the sources.
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
        """Returns once the tensors are made."""

    # Ours

    def join(self, control: str, transports: list[str]) -> None:
        """Make a publisher that offers what it does by default, or a receiver a transport."""
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

    def publish(self, version_id: str) -> Took:
        """Copy, take digests, announce."""
        assert self._publisher is not None
        with _timed() as took:
            self._publisher.publish(version_id, self._shards)
        return took

    def receive(self, version_id: str, transport: str) -> Took:
        """Lease, discover, plan, fetch, verify."""
        with _timed() as took:
            received = self._receivers[transport].receive_weights_scratch(
                version_id, timeout_s=_TIMEOUT_S
            )
        took.stages = dict(received.stats.seconds)
        assert received.stats.nbytes == self._case.target_bytes(self._rank)
        received.close()
        return took

    def check(self, version_id: str, transport: str) -> None:
        """Compare what arrives with what the sources made, byte for byte.

        Raises:
            AssertionError: a tensor differs.
        """
        with self._receivers[transport].receive_weights_scratch(version_id) as received:
            for name, expected in self._case.expected(self._rank):
                if not torch.equal(received[name].view(torch.int16), expected.view(torch.int16)):
                    raise AssertionError(f"{transport}: {name} is not what was published")

    # NIXL without any of our code while the clock runs

    def offer_raw(self) -> Any:
        """Register one buffer as large as the shards; returns what targets need to read it."""
        self._raw = NixlSource()
        self._buffer = torch.ones(self._case.source_bytes(self._rank), dtype=torch.uint8)
        return self._raw.register(self._buffer), self._buffer.data_ptr()

    def prepare_raw(self, offers: list[Any]) -> None:
        """Prepare reads of what the trainers hold, as they hold it, in one transfer a source; and
        of as many bytes in pieces that are as long as can be."""
        agent = new_agent("raw", serves=False)
        self._buffer = torch.zeros(self._case.target_bytes(self._rank), dtype=torch.uint8)
        agent.register_memory([self._buffer])
        short, long = [], []
        at = 0
        for rank, (offered, address) in enumerate(offers):
            mine, theirs, sizes = self._case.ranges(rank, self._rank)
            if not len(sizes):
                continue
            name = agent.add_remote_agent(offered.metadata)

            def prepared(
                mine: Any, theirs: Any, sizes: Any, name: str = name, address: int = address
            ) -> Any:
                device = np.zeros_like(sizes)
                here = np.stack([mine + self._buffer.data_ptr(), sizes, device], axis=1)
                there = np.stack([theirs + address, sizes, device], axis=1)
                described = [agent.get_xfer_descs(side, "DRAM") for side in (here, there)]
                return agent.initialize_xfer("READ", *described, name, b"")

            short.append(prepared(mine, theirs, sizes))
            whole = np.array([int(sizes.sum())])
            long.append(prepared(np.array([at]), np.array([0]), whole))
            at += int(whole[0])
        self._raw = agent, short, long

    def read_raw(self, long: bool) -> Took:
        """Read everything, in the ranges that the trainers hold or in long pieces."""
        agent, *prepared = self._raw
        handles = prepared[long]
        with _timed() as took:
            for handle in handles:
                agent.transfer(handle)
            waiting = list(handles)
            while waiting:
                states = [(handle, agent.check_xfer_state(handle)) for handle in waiting]
                if any(state == "ERR" for _, state in states):
                    raise RuntimeError("a raw NIXL read failed")
                waiting = [handle for handle, state in states if state != "DONE"]
        return took

    # Gloo

    def join_gloo(self, meeting: str, rank: int, world: int) -> None:
        """Meet."""
        dist.init_process_group(
            "gloo",
            init_method=meeting,
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=_TIMEOUT_S),
        )

    def broadcast(self) -> Took:
        """Every source sends all it has to everybody, a tensor at a time."""
        with _timed() as took:
            for source in range(self._case.sources):
                own = self._source and source == self._rank
                for index, size in enumerate(self._case.shard_elements(source)):
                    tensor = self._shards[index].tensor.reshape(-1) if own else self._landing(size)
                    dist.broadcast(tensor, source)
        return took

    def _landing(self, elements: int) -> torch.Tensor:
        if self._buffer.nbytes < 2 * elements:
            self._buffer = torch.zeros(2 * elements, dtype=torch.uint8)
        return self._buffer[: 2 * elements].view(torch.bfloat16)

    # Ray's object store

    def put_ray(self) -> tuple[Took, list[Any]]:
        """Put every shard; returns the references."""
        with _timed() as took:
            found = [ray.put(shard.tensor.view(torch.int16).numpy()) for shard in self._shards]
        return took, found

    def get_ray(self, references: list[list[Any]]) -> Took:
        """Get every shard and copy what is needed of it."""
        with _timed() as took:
            for source, some in enumerate(references):
                self._assemble(source, lambda index, some=some: ray.get(some[index]))
        return took

    # A file in memory

    def save_file(self, folder: str) -> Took:
        """Save the shards."""
        path = Path(folder) / f"{self._rank}.safetensors"
        with _timed() as took:
            save_file({shard.name: shard.tensor for shard in self._shards}, path)
        return took

    def load_file(self, folder: str) -> Took:
        """Load what is needed."""
        with _timed() as took:
            for source in range(self._case.sources):
                path = Path(folder) / f"{source}.safetensors"
                with safe_open(path, framework="pt") as file:
                    for name, here, there in self._case.slices(source, self._rank):
                        self._live[name][here] = file.get_slice(name)[there]
        return took

    def _assemble(self, source: int, shard: Callable[[int], np.ndarray[Any, Any]]) -> None:
        names = self._case.names
        for name, here, there in self._case.slices(source, self._rank):
            self._live[name].view(torch.int16).numpy()[here] = shard(names.index(name))[there]

    # Memory

    def copy(self) -> Took:
        """Copy as many bytes as this target needs, within its own memory."""
        nbytes = self._case.target_bytes(self._rank)
        if self._buffer.nbytes < nbytes:
            self._buffer = torch.zeros(nbytes, dtype=torch.uint8)
        flat = [live.reshape(-1).view(torch.uint8) for live in self._live.values()]
        with _timed() as took:
            at = 0
            for live in flat:
                self._buffer[at : at + live.nbytes].copy_(live)
                at += live.nbytes
        return took

    def close(self) -> None:
        """Let go of everything."""
        if self._publisher is not None:
            self._publisher.close()
        for receiver in self._receivers.values():
            receiver.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def _timed() -> Any:
    return _Timed()


class _Timed:
    def __enter__(self) -> Took:
        self._took = Took(time.monotonic(), 0.0)
        return self._took

    def __exit__(self, *_: object) -> None:
        self._took.ended = time.monotonic()


def together(took: list[Took]) -> float:
    """Seconds from the first beginning to the last end."""
    return max(one.ended for one in took) - min(one.began for one in took)
