"""verl's replay buffer and resume on TransferQueue's own storage and on the packed backend.

The admin service inspects the queue that verl's configuration started.

verl's wheel has no tests of these, so they use its public classes: the Hydra configuration, the
output of an agent loop, the replay buffer, and what the trainer does with the queue on a resume.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
import transfer_queue as tq
import verl
from hydra import compose, initialize_config_module
from integration.admin_service import Admin, admin
from integration.lean_ray import lean_ray
from integration.recipes import blocks
from integration.temporary_ray import temporary_ray
from PIL import Image
from tensordict import TensorDict
from transfer_queue.storage.managers.base import StorageManagerFactory
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils.tensordict_utils import get_tensordict

__all__ = ["admin", "lean_ray"]

UNIT_BYTES = 64 << 20
BACKENDS = {
    "SimpleStorage": ["transfer_queue.backend.SimpleStorage.num_data_storage_units=2"],
    # The overrides of the page, with two small units.
    "PackedStorage": [
        re.sub(
            "(?<=num_storage_units=).*",
            "2",
            re.sub("(?<=global_segment_size=).*", str(UNIT_BYTES), override),
        )
        for override in re.findall(r"\+?transfer_queue\.\S+", blocks("verl-storage", "bash"))
    ],
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with temporary_ray(num_cpus=8, namespace="verl"):
        yield


@pytest.fixture(params=[pytest.param("SimpleStorage", marks=pytest.mark.long), "PackedStorage"])
def started(cluster: None, request: pytest.FixtureRequest) -> Iterator[Callable[[], Any]]:
    """Return a function that starts a new queue as verl's ``TaskRunnerV1.run`` does."""

    def start() -> Any:
        tq.close()
        with initialize_config_module("verl.trainer.config", version_base=None):
            config = compose("ppo_trainer", overrides=BACKENDS[request.param])
        tq.init(config.transfer_queue)
        return config

    yield start
    tq.close()


@pytest.fixture
def config(started: Callable[[], Any]) -> Any:
    return started()


def prompts(uids: list[str]) -> TensorDict:
    """Return dataset rows; verl's prompts of vision models carry images."""
    image = Image.new("RGB", (2, 2), (255, 0, 0))
    return get_tensordict(
        {
            "index": torch.arange(len(uids)),
            "uid": uids,
            "raw_prompt": [
                [{"role": "user", "content": [{"type": "image", "image": image}, uid]}]
                for uid in uids
            ],
            "reward_model": [{"ground_truth": "4", "style": "rule"}] * len(uids),
        }
    )


class Trainer(SimpleNamespace):
    """State that verl's trainer reads in the methods that use the queue."""

    def __init__(self, step: int) -> None:
        self.issued: list[TensorDict] = []
        manager = SimpleNamespace(generate_sequences=self.issued.append)
        super().__init__(
            trainer_mode="separate_async", global_steps=step, agent_loop_manager=manager
        )


def output(uid: str, session: int) -> AgentLoopOutput:
    """Return what an agent loop returns, of a length that differs by session."""
    length = 3 + session
    return AgentLoopOutput(
        prompt_ids=[len(uid)] * 4,
        response_ids=list(range(length)),
        response_mask=[1] * length,
        response_logprobs=[-0.5] * length,
        reward_score=float(session),
        num_turns=2,
        metrics=AgentLoopMetrics(generate_sequences=0.1),
        extra_fields={
            "reward_extra_info": {"acc": session},
            "min_global_steps": 3,
            "max_global_steps": 3,
        },
    )


class Worker(AgentLoopWorkerTQ.__ray_metadata__.modified_class):
    """verl's agent loop worker without a model and scores; images and positions are made up."""

    def __init__(self) -> None:
        tq.init()

    async def _compute_score(self, outputs: Any, kwargs: Any) -> None: ...

    async def _compute_teacher_logprobs(self, *_: Any, **__: Any) -> None: ...

    def _compute_multi_modal_inputs(self, output: Any, input_ids: torch.Tensor) -> Any:
        return {"pixel_values": torch.ones(2, 3), "image_grid_thw": torch.tensor([[1, 2, 2]])}

    def _compute_position_ids(self, input_ids: torch.Tensor, *_: Any) -> torch.Tensor:
        return torch.arange(input_ids.shape[1])[None]

    async def roll_out(self, uids: list[str]) -> None:
        """Put two trajectories for each prompt."""
        for uid in uids:
            for session in range(2):
                # The columns of the prompt, as `generate_sequences` passes them on.
                row = {name: column[0] for name, column in prompts([uid]).items()}
                row = {name: getattr(value, "data", value) for name, value in row.items()}
                kwargs = {**row, "session_id": session, "global_steps": 3}
                await self._agent_loop_postprocess(output(uid, session), validate=False, **kwargs)
            tag = {"is_prompt": True, "status": "finished", "global_steps": 3}
            await tq.async_kv_put(key=uid, partition_id="train", tag=tag)


def dispatch(uids: list[str]) -> None:
    PPOTrainer._submit_batch_to_rollout(Trainer(step=3), prompts(uids))


def roll_out(uids: list[str]) -> None:
    asyncio.run(Worker().roll_out(uids))


def replay_buffer(config: Any, kind: type[ReplayBuffer], mode: str) -> ReplayBuffer:
    return kind(mode, config.trainer, 2, "drop", {}, poll_interval=0.05, refill_fn=lambda _: None)


def rows(meta: Any) -> dict[str, dict[str, Any]]:
    """Return the values of a batch by key, with tensors as lists."""
    data = tq.kv_batch_get(keys=meta.keys, partition_id=meta.partition_id)
    columns = {
        name: [row.tolist() for row in column.unbind()]
        if isinstance(column, torch.Tensor)
        else column.tolist()
        for name, column in data.items()
        if name != "multi_modal_inputs"  # tensors inside of dicts do not compare
    }
    return {
        key: {name: column[i] for name, column in columns.items()}
        for i, key in enumerate(meta.keys)
    }


def test_import_of_verl_registers_the_packed_backend() -> None:
    assert verl.__version__ == "0.9.1"
    assert "PackedStorage" in StorageManagerFactory._registry


def test_replay_buffer_samples_what_agent_loops_elsewhere_put(config: Any) -> None:
    dispatch(["u1", "u2"])
    worker = ray.remote(Worker).remote()
    ray.get(worker.roll_out.remote(["u1", "u2"]), timeout=180)
    ray.kill(worker)
    batch, _ = replay_buffer(config, ReplayBuffer, "sync").sample(3, "train", batch_size=2)
    assert sorted(batch.keys) == ["u1_0_0", "u1_1_0", "u2_0_0", "u2_1_0"]
    read = rows(batch)["u2_1_0"]
    assert read["prompts"] == [2] * 4
    assert read["responses"] == [0, 1, 2, 3]
    assert read["rollout_log_probs"] == [-0.5] * 4
    assert read["extra_fields"]["reward_extra_info"] == {"acc": 1}
    values = tq.kv_batch_get(batch.keys, "train", select_fields=["multi_modal_inputs"])
    for value in values["multi_modal_inputs"]:
        assert torch.equal(value["pixel_values"], torch.ones(2, 3))


def test_stages_add_their_columns(config: Any) -> None:
    dispatch(["u1"])
    roll_out(["u1"])
    batch, _ = replay_buffer(config, ReplayBuffer, "sync").sample(3, "train", batch_size=1)
    read = tq.kv_batch_get(batch.keys, "train", select_fields=["responses"])["responses"]
    log_probs = torch.nested.nested_tensor_from_jagged(read.values() * -0.1, read.offsets())
    tq.kv_batch_put(batch.keys, "train", TensorDict({"old_log_probs": log_probs}, [2]))
    again = rows(batch)
    for key in batch.keys:
        assert again[key]["old_log_probs"] == pytest.approx(
            [-0.1 * token for token in again[key]["responses"]]
        )
    tq.kv_clear(batch.keys, "train")
    assert not tq.kv_list("train").get("train")


def test_resume_restores_finished_samples_and_reissues_others(
    started: Callable[[], Any], tmp_path: Path
) -> None:
    started()
    dispatch(["u1", "u2", "u3"])
    roll_out(["u1", "u2"])
    before = SimpleNamespace(keys=["u1_0_0", "u2_1_0"], partition_id="train")
    expected = rows(before)
    tq.save_checkpoint(tmp_path / "transfer_queue", metadata={"global_steps": 3})

    config = started()
    tq.load_checkpoint(tmp_path / "transfer_queue")
    assert rows(before) == expected
    trainer = Trainer(step=4)
    assert PPOTrainer._reissue_inflight_prompts(trainer) == 1
    [prompt] = trainer.issued[0]["raw_prompt"]
    assert prompt[0]["content"][0]["image"].getpixel((0, 0)) == (255, 0, 0)
    assert prompt[0]["content"][1] == "u3"
    roll_out(["u3"])
    batch, _ = replay_buffer(config, ReplayBufferAsync, "separate_async").sample(4, "train", 3)
    assert sorted({key.partition("_")[0] for key in batch.keys}) == ["u1", "u2", "u3"]
    assert len(batch.keys) == 6


@pytest.mark.parametrize("started", list(BACKENDS), indirect=True)
def test_admin_service_lists_partitions_tasks_and_units(config: Any, admin: Admin) -> None:
    dispatch(["u1", "u2"])
    roll_out(["u1"])
    tq.get_client().get_meta(["responses"], 1, "train", task_name="update_actor")

    is_packed = config.transfer_queue.backend.storage_backend == "PackedStorage"

    def read() -> Any:
        # The service shows the previous queue until it has noticed its end.
        answer = admin.ask("partitions")
        limits = {unit["capacity"] for unit in answer["storage"]}
        tasks = [task for partition in answer["partitions"] for task in partition["tasks"]]
        return answer if tasks and limits == {UNIT_BYTES if is_packed else None} else None

    answer = admin.until(read)
    (partition,) = answer["partitions"]
    assert (partition["id"], partition["present"]) == ("train", 4)  # two prompts, two responses
    written = {field["name"]: field["written"] for field in partition["fields"]}
    assert (written["raw_prompt"], written["responses"]) == (4, 2)
    (task,) = partition["tasks"]
    assert (task["name"], task["acknowledged"], task["unclaimed"]) == ("update_actor", 1, 3)
    units = answer["storage"]
    assert len(units) == 2
    assert all(unit["used"] > 0 for unit in units)
