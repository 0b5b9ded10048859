"""What the tests of vLLM's engine share: a trainer with real publishers, and a server's engines."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from stand_in_model import TinyConfig, TinyForCausalLM, digest_of
from stand_in_vllm import provide

from refit_mx.control.client import ControlClient
from refit_mx.control.embedded import EmbeddedControlServer
from refit_mx.engine.registration import register
from refit_mx.publisher import HF_RAW, MxV2TrainingPublisher
from refit_mx.shard_sources import LocalShard
from refit_mx.tensor_types import Box

CONFIG = TinyConfig()


MODEL = "tiny"


class Trainer:
    """Two ranks that publish versions of a model in halves, as FSDP does."""

    def __init__(self, registry=HF_RAW, ranks=2):
        self.server = EmbeddedControlServer(retention=3)
        self.control = ControlClient(self.server.address)
        self.publishers = [
            MxV2TrainingPublisher(
                MODEL,
                f"fsdp-{rank}",
                control=self.control,
                registry=registry,
                transports=("tcp",),
                timeout_s=30,
            )
            for rank in range(ranks)
        ]

    def publish(self, version_id, tensors):
        slots = [f"fsdp-{rank}" for rank in range(len(self.publishers))]
        self.control.create_version(MODEL, slots, idempotency_key=version_id, version_id=version_id)
        for rank, publisher in enumerate(self.publishers):
            publisher.publish(
                version_id, [part_of(n, t, rank, len(slots)) for n, t in tensors.items()]
            )

    def close(self):
        for publisher in self.publishers:
            publisher.close()
        self.control.close()
        self.server.close()


def part_of(name, tensor, rank, ranks):
    """A rank's rows; of what has none, all."""
    if not tensor.ndim:
        return LocalShard.whole(name, tensor)
    rows = -(-tensor.shape[0] // ranks)
    first, stop = min(rank * rows, tensor.shape[0]), min((rank + 1) * rows, tensor.shape[0])
    shape = tuple(tensor.shape)
    box = Box((first, *(0,) * (len(shape) - 1)), (stop - first, *shape[1:]))
    return LocalShard(name, shape, box, tensor[first:stop])


class Workers:
    """The engines of one server of the newest form, one a rank."""

    def __init__(self, config=CONFIG, tp_size=2, models=None):
        factory = provide("new")
        assert register()
        self.models = models or [TinyForCausalLM(config, tp_size, r) for r in range(tp_size)]
        self.engines = [
            factory.create_engine(
                SimpleNamespace(backend="mx"),
                SimpleNamespace(
                    model_config=SimpleNamespace(model=MODEL),
                    parallel_config=SimpleNamespace(rank=rank),
                ),
                torch.device("cpu"),
                model,
            )
            for rank, model in enumerate(self.models)
        ]

    def init(self, trainer, **info):
        for engine in self.engines:
            engine.init_transfer_engine(
                engine.parse_init_info(
                    {"control_address": trainer.server.address, "transport": "tcp", **info}
                )
            )

    def receive(self, **info):
        for engine in self.engines:
            engine.start_weight_update()
        for engine in self.engines:
            engine.update_weights(info)

    def finish(self):
        for engine in self.engines:
            engine.finish_weight_update()

    def update(self, version_id, **info):
        self.receive(version_id=version_id, **info)
        self.finish()

    @property
    def digests(self):
        return [digest_of(model) for model in self.models]

    def close(self):
        for engine in self.engines:
            engine.shutdown()


def loaded(tensors, config=CONFIG, tp_size=2):
    """Digests of ranks that loaded whole tensors."""
    made = []
    for rank in range(tp_size):
        model = TinyForCausalLM(config, tp_size, rank)
        model.load_weights(tensors.items())
        made.append(digest_of(model))
    return made
