"""A process that is one rank of a trainer with ModelExpress's own client.

It reads commands with version ids from standard input and answers on standard output, a line each.
"""

import argparse
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

TIMEOUT_S = 60.0


def weight(name, shape, version):
    """Compute a full tensor, equal in every process; bfloat16 holds each value exactly."""
    count = 1
    for size in shape:
        count *= size
    seed = sum(map(ord, name)) + 17 * version
    values = (torch.arange(count, dtype=torch.int64) * 7 + seed) % 256 - 128
    return values.reshape(shape).to(torch.bfloat16)


SHAPES = {"embed": (10, 6), "mlp.up": (7, 5), "mlp.down": (5, 7), "norm": (6,)}


def say(*words):
    sys.stdout.write(" ".join(words) + "\n")
    sys.stdout.flush()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--rendezvous", required=True)
    parser.add_argument("--server", required=True)
    parser.add_argument("--ports", required=True)
    arguments = parser.parse_args()
    nixl_port, grpc_port = (int(port) for port in arguments.ports.split(","))
    os.environ.update(
        MX_WORKER_HOST="127.0.0.1",
        MX_METADATA_PORT=str(nixl_port),
        MX_WORKER_GRPC_PORT=str(grpc_port),
        RANK=str(arguments.rank),
        LOCAL_RANK=str(arguments.rank),
    )
    dist.init_process_group(
        "gloo",
        init_method=f"file://{arguments.rendezvous}",
        rank=arguments.rank,
        world_size=arguments.world,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    from modelexpress_seams import modelexpress_on_cpu

    with modelexpress_on_cpu():
        serve_commands(arguments)
    dist.destroy_process_group()


def serve_commands(arguments):
    from modelexpress_rl import (
        FSDPTrainerContext,
        ModelExpressTrainerClient,
        ModelExpressTrainerConfig,
        TrainerStagingMode,
        WeightPayloadFormat,
        WeightVersionRef,
    )

    mesh = init_device_mesh("cpu", (arguments.world,))
    config = ModelExpressTrainerConfig(
        device_id=0,
        model_name="m",
        staging_mode=TrainerStagingMode.COPY_TO_DEVICE,
        payload_format=WeightPayloadFormat.FULL_TENSOR,
        worker_id=f"trainer-{arguments.rank}-{os.getpid()}",
        server_url=arguments.server,
        registration_ttl_seconds=6,
        rpc_timeout_seconds=20.0,
        engine_context=FSDPTrainerContext(),
    )
    with ModelExpressTrainerClient.initialize(config) as client:
        say("slot", client.source_slot_id)
        for line in sys.stdin:
            word, version_id, number = line.split()
            version = WeightVersionRef(version_id)
            if word == "publish":
                tensors = {
                    name: distribute_tensor(
                        weight(name, shape, int(number)),
                        mesh,
                        [Replicate() if name == "norm" else Shard(0)],
                    )
                    for name, shape in SHAPES.items()
                }
                client.stage_shard(version=version, tensors=tensors).publish()
            else:
                client.release_version(version=version)
            say("done", word)


if __name__ == "__main__":
    main()
