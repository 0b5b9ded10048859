"""Real servers and a trainer for tests of a fleet, and checks to make after each refit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import torch.distributed
from integration.vllm.answers import Answer, answers
from integration.vllm.published import Trainer, checkpoint
from integration.vllm.server import VllmServer, start_server, wait_until_ready
from integration.vllm.tiny_model import MAX_LENGTH

from refit_mx import Deadline, FleetError, RefitFleet
from refit_mx.fleet.barrier import PhaseBarrier, Point

OPTIONS = [
    *("--weight-transfer-config", '{"backend": "mx"}'),
    *("--worker-extension-cls", "integration.vllm.faults.FaultyWorker"),
    *("--max-model-len", str(MAX_LENGTH)),
]
TIMEOUT_S = 90.0
WAIT_S = 60.0
_VERSIONS = itertools.count(1)


def call(server: VllmServer, path: str, body: Any = None, *, method: str = "POST") -> Any:
    """Call a route of vLLM and return its answer."""
    return (
        httpx.request(method, server.address + path, json=body, timeout=60, trust_env=False)
        .raise_for_status()
        .json()
    )


def statuses(server: VllmServer) -> list[dict[str, Any]]:
    """Return the status of each rank."""
    return list(call(server, "/collective_rpc", {"method": "refit_status"})["results"])


def on_workers(server: VllmServer, method: str, *arguments: object) -> None:
    """Call a method of `integration.vllm.faults.FaultyWorker`."""
    call(server, "/collective_rpc", {"method": method, "args": [str(a) for a in arguments]})


def is_paused(server: VllmServer) -> bool:
    """Return whether a server is paused."""
    return bool(call(server, "/is_paused", method="GET")["is_paused"])


@dataclass
class FleetRig:
    """Servers, and a trainer that publishes to them.

    Attributes:
        servers: all servers.
        trainer: publisher of versions.
        models: function that returns the model folder of a seed.
        reference: function that returns a fresh vLLM's answers, by seed and options.
        options: options of the servers, in addition to `OPTIONS`.
    """

    servers: Sequence[VllmServer]
    trainer: Trainer
    models: Callable[..., Path]
    reference: Callable[..., list[Answer]]
    options: Sequence[str] = ()

    def fleet(self, *, init_info: dict[str, Any] | None = None, **options: Any) -> RefitFleet:
        """Return a new client that has not yet called the servers."""
        return RefitFleet(
            [server.address for server in self.servers],
            init_info=self.trainer.init_info(**(init_info or {})),
            **{"timeout_s": TIMEOUT_S, **options},
        )

    def tensors(self, seed: int) -> dict[str, torch.Tensor]:
        """Return the checkpoint of a seed."""
        return checkpoint(self.models(seed))

    def name(self, seed: int) -> str:
        """Return a new version name."""
        return f"v{next(_VERSIONS)}-seed{seed}"

    def publish(self, seed: int, tensors: dict[str, torch.Tensor] | None = None) -> str:
        """Publish a seed's weights, or ``tensors``, under a new name; return the name."""
        version_id = self.name(seed)
        self.trainer.publish(version_id, self.tensors(seed) if tensors is None else tensors)
        return version_id

    def refit(self, seed: int, fleet: RefitFleet | None = None) -> str:
        """Refit all servers to a seed's weights, and check that they serve them."""
        version_id = self.publish(seed)
        (fleet or self.fleet()).refit(version_id)
        self.assert_serve(seed, version_id)
        return version_id

    def assert_serve(
        self, seed: int, version_id: str | None = None, servers: Sequence[VllmServer] | None = None
    ) -> None:
        """Check that servers answer like a fresh vLLM and report ``version_id``."""
        for server in self.servers if servers is None else servers:
            assert not is_paused(server)
            ranks = statuses(server)
            assert [rank["fenced"] for rank in ranks] == [None] * len(ranks)
            assert not any(rank["session"] for rank in ranks)
            if version_id is not None:
                assert {rank["version_id"] for rank in ranks} == {version_id}
                info = call(server, "/weight_info", method="GET")
                assert info == {"weight_version": version_id}
            # Equal to the last bit: a fresh server with as many ranks sums in the same order.
            assert answers(server.address) == self.reference(seed, *self.options)

    def revive(self) -> None:
        """Restart the servers whose process has exited."""
        ended = [server for server in self.servers if server.process.exit_code is not None]
        for server in ended:
            server.kill()  # its remaining processes
            server.start()
        wait_until_ready(ended)


@contextmanager
def started_rig(
    models: Callable[..., Path],
    reference: Callable[..., list[Answer]],
    folder: Path,
    *options: str,
    servers: int = 2,
    slots: int = 3,
) -> Iterator[FleetRig]:
    """Start servers with the weights of seed 0, and a trainer."""
    started = [start_server(models(0), folder, *OPTIONS, *options) for _ in range(servers)]
    try:
        wait_until_ready(started)
        with Trainer("tiny", slots=slots) as trainer:
            yield FleetRig(started, trainer, models, reference, options)
    finally:
        for server in started:
            server.close()


@contextmanager
def at_point(point: Point, act: Callable[[], None]) -> Iterator[PhaseBarrier]:
    """Run a second trainer rank that calls ``act`` before it arrives at a point of a refit."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def barrier(rank: int) -> PhaseBarrier:
        connected = torch.distributed.TCPStore(
            "127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=WAIT_S)
        )
        return PhaseBarrier(connected, rank=rank, world_size=2)

    driver, follower = barrier(0), barrier(1)

    def follow() -> None:
        follower.begin()
        for each in Point:
            if each is point:
                act()
            try:
                follower.meet(each, Deadline(WAIT_S, "the second rank"))
            except FleetError:
                return  # the driver has failed

    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(follow)
        yield driver
        following.result(2 * WAIT_S)
