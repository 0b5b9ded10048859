"""Multi-turn rollouts that write their bulk data directly to a data plane."""

from __future__ import annotations

from rollout_actor.actor import SyncRolloutActor
from rollout_actor.flatten import OPT_IN_CARRY_KEYS, flatten_rollout_message_log
from rollout_actor.interfaces import (
    AsyncGenerationInterface,
    EnvironmentInterface,
    EnvironmentReturn,
    EnvironmentReturnDict,
    GenerationInterface,
    GenerationOutput,
    MessageLog,
    Observation,
    RemoteStep,
    TokenizerInterface,
    VisibleTurn,
    WeightVersionSpan,
)
from rollout_actor.rollout import run_async_multi_turn_rollout, run_multi_turn_rollout

__all__ = [
    "OPT_IN_CARRY_KEYS",
    "AsyncGenerationInterface",
    "EnvironmentInterface",
    "EnvironmentReturn",
    "EnvironmentReturnDict",
    "GenerationInterface",
    "GenerationOutput",
    "MessageLog",
    "Observation",
    "RemoteStep",
    "SyncRolloutActor",
    "TokenizerInterface",
    "VisibleTurn",
    "WeightVersionSpan",
    "flatten_rollout_message_log",
    "run_async_multi_turn_rollout",
    "run_multi_turn_rollout",
]
