"""NeMo-RL's factory with a client from here, and the layers from here on NeMo-RL's client.

NeMo-RL is on no index. `standin` has the names and signatures of its public reference, and a client
with these methods alone, which stores values in a real TransferQueue.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from nemo_rl.data_plane import interfaces
from nemo_rl.data_plane.factory import build_data_plane_client
from rollout_doubles import Adder, Arithmetic, CharTokenizer, batch_of, config
from tensordict import TensorDict

import dataplane_core
from column_io import (
    BatchedDataDict,
    attach_message_log_view,
    kv_first_write,
    read_columns,
    shard_meta_for_dp,
    write_columns,
)
from dataplane_core import GLOBAL_FORWARD_PAD_SEQLEN, ConfigError
from dataplane_tq import QueueInspector
from rollout_actor import SyncRolloutActor

ROOT = Path(__file__).parents[2]
# As NeMo-RL's YAML has it.
DATA_PLANE = {
    "enabled": True,
    "impl": "transfer_queue",
    "backend": "simple",
    "storage_capacity": 1000,
    "num_storage_units": 2,
    "claim_meta_poll_interval_s": 0.05,
    "global_segment_size": 64 << 20,
    "local_buffer_size": 1 << 20,
    "observability": {"enabled": False},
}
CONFIGS = {
    "nemo_rl": DATA_PLANE,
    "packed": {**DATA_PLANE, "impl": "rl_dataplane", "backend": "packed"},
    "simple": {**DATA_PLANE, "impl": "rl_dataplane"},
}


@pytest.fixture(scope="module", params=list(CONFIGS))
def cfg(request: pytest.FixtureRequest) -> dict[str, Any]:
    return CONFIGS[request.param]


@pytest.fixture(scope="module")
def client(cluster: None, cfg: dict[str, Any]) -> Iterator[Any]:
    """Return the client that NeMo-RL's factory builds on the driver."""
    client = build_data_plane_client(cfg)
    yield client
    client.close()


@pytest.fixture
def partition(client: Any, request: pytest.FixtureRequest) -> Iterator[str]:
    name = request.node.name
    client.register_partition(name, ["x"], 8, ["train"])
    yield name
    client.clear_samples(None, name)


def rollout() -> BatchedDataDict:
    return BatchedDataDict(
        input_ids=torch.tensor([[1, 2, 3, 0], [4, 5, 0, 0]]),
        input_lengths=torch.tensor([3, 2]),
        generation_logprobs=torch.tensor([[0.0, -1.0, -2.0, 0], [0.0, -3.0, 0, 0]]),
        token_mask=torch.tensor([[0, 1, 1, 0], [0, 1, 0, 0]]),
        sample_mask=torch.tensor([1.0, 0.0]),
        image_sizes=torch.tensor([[4, 5], [6, 7]]),
        content=np.array(["a", {"b": None}], dtype=object),
    )


def test_factory_has_the_branch_of_the_recipe() -> None:
    recipe = (ROOT / "docs/recipes/nemo-rl.md").read_text()
    (branch,) = re.findall(r"```python\n(elif .*?)```", recipe, re.DOTALL)
    lines = [line.strip() for line in branch.splitlines() if line.strip()]
    factory = [line.strip() for line in inspect.getsource(build_data_plane_client).splitlines()]
    first = factory.index(lines[0])
    assert [line for line in factory[first:] if line][: len(lines)] == lines


@pytest.mark.parametrize("name", sorted(interfaces.DataPlaneClient.__abstractmethods__))
def test_methods_take_the_arguments_of_the_reference(name: str) -> None:
    from dataplane_tq.nemo_rl import NeMoRLClient

    reference = inspect.signature(getattr(interfaces.DataPlaneClient, name)).parameters.values()
    own = inspect.signature(getattr(NeMoRLClient, name)).parameters.values()
    positional = [(each.name, each.default) for each in own if each.kind != each.KEYWORD_ONLY]
    assert positional == [(each.name, each.default) for each in reference]


def test_client_and_its_metas_are_of_nemo_rl_classes(client: Any, partition: str) -> None:
    assert isinstance(client, interfaces.DataPlaneClient)
    columns = TensorDict({"x": torch.tensor([1, 2])}, [2])
    put = client.put_samples(["a", "b"], partition, columns, [{"std": 0.5}, {"std": 1.0}])
    claim = client.claim_meta(partition, "train", ["x"], 2)
    assert put.concat(claim).sample_ids == ["a", "b", "a", "b"]
    assert client.get_data(claim)["x"].tolist() == [1, 2]
    assert claim.tags == [{"std": 0.5}, {"std": 1.0}]
    assert client.check_consumption_status(partition, ["train"])
    client.clear_samples(["a"], partition)
    assert client.get_samples(["b"], partition, ["x"])["x"].tolist() == [2]


@pytest.mark.parametrize("cfg", ["nemo_rl"], indirect=True)
def test_inspector_of_any_queue_lists_what_the_client_wrote(client: Any, partition: str) -> None:
    columns = TensorDict({"x": torch.tensor([1, 2]), "y": torch.tensor([3, 4])}, [2])
    client.put_samples(["a", "b"], partition, columns, [{"std": 0.5}, {"std": 1.0}])
    assert client.claim_meta(partition, "train", ["x"], 1).sample_ids == ["a"]
    address = ray.get_runtime_context().gcs_address
    with closing(QueueInspector(address, timeout_s=60.0)) as inspector:
        (summary,) = [p for p in inspector.list_partitions() if p.partition_id == partition]
        samples = inspector.list_samples(partition)
    assert {field.name: field.written for field in summary.fields} == {"x": 2, "y": 2}
    assert [(task.name, task.acknowledged) for task in summary.tasks] == [("train", 1)]
    assert [(each.sample_id, each.tags) for each in samples] == [
        ("a", {"std": 0.5}),
        ("b", {"std": 1.0}),
    ]


def test_columns_of_a_step_go_through_the_client(client: Any, partition: str) -> None:
    meta = kv_first_write(
        rollout(), sample_ids=["p_g0", "p_g1"], dp_client=client, partition_id=partition
    )
    meta.extra_info[GLOBAL_FORWARD_PAD_SEQLEN] = 6
    shards, _ = shard_meta_for_dp(meta, dp_world=2)
    for shard in shards:
        batch = read_columns(client, shard, ["input_ids", "token_mask"])
        assert batch["input_ids"].shape == (1, 6)
        write_columns(client, shard, {"prev_logprobs": batch["input_ids"] * -0.5})
    write_columns(client, meta, {"advantages": torch.tensor([0.25, -0.25])})
    names = [*meta.fields, "prev_logprobs", "advantages"]
    read = read_columns(client, meta, names, pad_value_dict={"input_ids": 9})
    assert read["input_ids"].tolist() == [[1, 2, 3, 9, 9, 9], [4, 5, 9, 9, 9, 9]]
    assert read["prev_logprobs"].tolist() == [[-0.5, -1, -1.5, 0, 0, 0], [-2, -2.5, 0, 0, 0, 0]]
    assert read["token_mask"].tolist() == [[0, 1, 1, 0, 0, 0], [0, 1, 0, 0, 0, 0]]
    assert read["advantages"].tolist() == [0.25, -0.25]
    assert read["sample_mask"].tolist() == [1.0, 0.0]
    assert read["content"].tolist() == ["a", {"b": None}]
    assert read["image_sizes"].tolist() == [[4, 5], [6, 7]]  # jagged in TransferQueue
    jagged = read_columns(client, meta, ["generation_logprobs"], layout="jagged")
    assert [row.tolist() for row in jagged["generation_logprobs"].unbind()] == [
        [0, -1, -2],
        [0, -3],
    ]


def test_rollout_actor_elsewhere_puts_through_the_client(
    client: Any, cfg: dict[str, Any], partition: str
) -> None:
    # NeMo-RL's impl transfer_queue names another client here.
    attach = cfg if cfg["impl"] == "rl_dataplane" else {**cfg, "impl": "nemo_rl"}
    environment = ray.remote(Arithmetic).remote()
    actor = SyncRolloutActor.remote(
        Adder(), CharTokenizer(), {"sum": environment}, config(), attach
    )
    prompts = batch_of(["1+2=", "1+2=", "30+4=", "30+4="], more=["5+5="])
    meta, carry, _, _ = ray.get(
        actor.rollout_to_tq.remote(prompts, partition_id=partition, group_size=2), timeout=180
    )
    ray.get(actor.shutdown.remote(), timeout=60)
    assert carry["total_reward"].tolist() == [2.0] * 4
    turns = ["content", "turn_lengths", "turn_roles", "turn_contents"]
    batch = read_columns(client, meta, ["input_ids", "token_mask", "generation_logprobs", *turns])
    attach_message_log_view(batch)
    assert [turn["content"] for turn in batch["message_log"][2]] == [
        "30+4=",
        "34. So it is.",
        " 5+5=",
        "10. So it is.",
        "",
    ]
    assert batch["token_mask"].sum(1).tolist() == [25, 25, 26, 26]


def test_other_entries_of_nemo_rl_configuration_are_refused(cluster: None) -> None:
    cfg = {**CONFIGS["packed"], "compression": "zstd"}
    for build in (build_data_plane_client, dataplane_core.build_data_plane_client):
        with pytest.raises(ConfigError, match="compression"):
            build(cfg)
