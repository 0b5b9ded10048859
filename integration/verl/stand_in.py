"""verl's task runner and trainers with stand-ins for what needs GPUs.

The loops, their hooks and timers, the replay buffers and the queue are verl's.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import ray
import transfer_queue as tq
import verl.trainer.ppo.v1 as trainers
from integration.verl.test_replay_buffer import Worker, prompts
from integration.waiting import wait_until
from tensordict import TensorDict
from verl.trainer.main_ppo import TaskRunnerV1
from verl.trainer.ppo.v1.trainer_separate_async import HybridEngineMode

OVERRIDES = [
    *("trainer.logger=[console]", "trainer.val_before_train=False", "trainer.total_epochs=9"),
    *("trainer.test_freq=-1", "trainer.save_freq=100", "data.train_batch_size=2"),
    *("algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.use_kl_loss=True"),
    # Of the mode separate_async.
    "actor_rollout_ref.actor.ppo_mini_batch_size=1",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl",
    "trainer.v1.separate_async.parameter_sync_step=2",
    "trainer.v1.separate_async.num_warmup_batches=0",
    "trainer.v1.separate_async.hybrid_rollout.enable_switch=True",
]


def settings(
    *, done: int = 0, total: int = 2, failing: int = -1, wait_for: object = "/"
) -> list[str]:
    """Return the overrides of a run's settings.

    Args:
        done: steps before a resume.
        total: number of the last step, from 1.
        failing: number of the step that fails.
        wait_for: file whose creation the last step waits for.
    """
    values = {"done": done, "total": total, "failing": failing, "wait_for": wait_for}
    return [f"+stand_in.{name}={value}" for name, value in values.items()]


def work(self: Any, batch: Any, metrics: Any = None, **_: Any) -> Any:
    time.sleep(0.01)
    return batch


def nothing(*_: Any, **__: Any) -> None: ...


def stand_in(trainer: type) -> type:
    """Return verl's trainer without workers."""

    class StandIn(trainer):
        def _setup(self) -> None:
            self.steps_per_epoch, self.total_training_steps = 4, self.config.stand_in.total
            self.global_steps = self.config.stand_in.done  # as after a resume
            self._init_dump_executor()
            self.current_mode = HybridEngineMode.ROLLOUT
            self.replay_buffer.poll_interval = 0.05
            self.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=None)
            self.checkpoint_manager = Mock(**{"update_weights.return_value": None})
            self.standalone_checkpoint_manager = self.checkpoint_manager

        def _next_train_batch(self, num_prompts: int | None = None) -> TensorDict:
            count = num_prompts or self.config.data.train_batch_size
            return prompts([uuid.uuid4().hex for _ in range(count)])

        def _save_checkpoint(self) -> None:
            wait_until(Path(self.config.stand_in.wait_for).exists, 120)

        def _compute_advantage(self, batch: Any, metrics: Any) -> Any:
            where = {"keys": batch.keys, "partition_id": batch.partition_id}
            data = tq.kv_batch_get(**where, select_fields="rm_scores")
            data["advantages"] = data["returns"] = data["rm_scores"]
            tq.kv_batch_put(**where, fields=data.select("advantages", "returns"))
            return work(self, batch)

        def _get_n_gpus_for_throughput(self) -> int:
            return 1

        def _update_actor(self, batch: Any, metrics: Any) -> Any:
            if self.global_steps == self.config.stand_in.failing:
                raise RuntimeError("out of memory")
            return work(self, batch)

        _compute_reward_colocate = _compute_old_log_prob = _compute_ref_log_prob = work
        _balance_batch = work
        add_replicas_to_balancer = remove_replicas_from_balancer = clear_sticky_cache = nothing

    return StandIn


@ray.remote
class Runner(TaskRunnerV1.__ray_metadata__.modified_class):
    """verl's task runner, with the trainer replaced by its `stand_in`."""

    def run(self, config: Any) -> None:
        of_mode = trainers.get_trainer_cls
        trainers.get_trainer_cls = lambda mode: stand_in(of_mode(mode))
        super().run(config)

    def init_agent_loop_manager(self) -> None:
        def generate_sequences(batch: TensorDict) -> None:
            asyncio.run(Worker().roll_out(list(batch["uid"])))

        self.agent_loop_manager = SimpleNamespace(generate_sequences=generate_sequences)
