"""What the tests of engines in stand-in servers share: a trainer, and what servers then hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from stand_in_model import TinyConfig, TinyForCausalLM, checkpoint, digest_of
from vllm_servers import StandIn

from refit_mx.control.client import ControlClient
from refit_mx.control.embedded import EmbeddedControlServer
from refit_mx.fleet.client import RefitFleet
from refit_mx.publisher import MxV2TrainingPublisher
from refit_mx.shard_sources import LocalShard
from refit_mx.tensor_types import Box

CONFIG = TinyConfig()
TP = (2, 1)
SLOTS = ["fsdp-0", "fsdp-1"]


def halves(tensors, rank):
    """A rank's rows of every tensor, the first rank one more of an odd number."""
    made = []
    for name, tensor in tensors.items():
        rows = -(-tensor.shape[0] // 2)
        part = tensor[:rows] if rank == 0 else tensor[rows:]
        start = (rank * rows, *(0,) * (tensor.ndim - 1))
        made.append(LocalShard(name, tuple(tensor.shape), Box(start, tuple(part.shape)), part))
    return made


class Trainer:
    def __init__(self, transport):
        self.server = EmbeddedControlServer(retention=2)
        self.control = ControlClient(self.server.address)
        self.publishers = [
            MxV2TrainingPublisher(
                "tiny",
                slot,
                control=self.control,
                timeout_s=60,
                transports=("tcp",) if transport == "tcp" else ("nixl", "tcp"),
            )
            for slot in SLOTS
        ]

    def publish(self, seed):
        version = f"v{seed}"
        self.control.create_version("tiny", SLOTS, idempotency_key=version, version_id=version)
        for rank, publisher in enumerate(self.publishers):
            publisher.publish(version, halves(checkpoint(CONFIG, seed), rank))
        return version

    def close(self):
        for publisher in self.publishers:
            publisher.close()
        self.control.close()
        self.server.close()


@contextmanager
def served(transport) -> Iterator[tuple[Trainer, list[StandIn], dict[str, object]]]:
    """A trainer, two servers of two ranks and of one, and the options of their engines."""
    trainer = Trainer(transport)
    servers = [StandIn("--backend", "mx", "--tp", str(tp)) for tp in TP]
    info = {"control_address": trainer.server.address, "transport": transport, "timeout_s": 60}
    try:
        for server in servers:
            server.ready()
        yield trainer, servers, info
    finally:
        for server in servers:
            server.kill()
        trainer.close()


def digests(seed, tp):
    made = []
    for rank in range(tp):
        model = TinyForCausalLM(CONFIG, tp, rank)
        model.load_weights(checkpoint(CONFIG, seed).items())
        made.append(digest_of(model))
    return made


def fleet_of(servers, info, **options):
    return RefitFleet(
        [server.url for server in servers], init_info=info, **{"timeout_s": 90.0, **options}
    )


def assert_serve(servers, seed):
    for server, tp in zip(servers, TP, strict=True):
        server.wait_for("the version", lambda state: not state["is_paused"])
        assert server.state["digests"] == digests(seed, tp)
