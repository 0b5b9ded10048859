"""New weights from trainers to every generator, exactly once and never torn.

Importing this package imports neither torch nor gRPC: the names that need them are loaded when they
are first used.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING

from refit_mx.errors import (
    CompileError,
    CompileTargetError,
    ControlAccessError,
    ControlError,
    ControlUnavailableError,
    DigestMismatchError,
    FencedError,
    FleetError,
    LayoutError,
    LeaseLostError,
    PhaseError,
    ProtocolError,
    RefitConfigError,
    RefitError,
    RefitTimeoutError,
    ScratchExhaustedError,
    SourceLostError,
    VersionLeasedError,
    VersionNotFoundError,
    VersionNotReadyError,
)
from refit_mx.layout import (
    TargetTPLayout,
)
from refit_mx.slice_range import (
    SliceRange,
    intersect,
)
from refit_mx.tensor_types import (
    Box,
    TensorSpec,
)

if TYPE_CHECKING:
    from refit_mx.bounded_control import (
        patiently,
    )
    from refit_mx.compile.base import (
        CompilePass,
        compile_pass,
        register_compile_pass,
    )
    from refit_mx.control.access import (
        ControlAccess,
    )
    from refit_mx.control.client import (
        ControlClient,
    )
    from refit_mx.control.embedded import (
        EmbeddedControlServer,
    )
    from refit_mx.cuts import (
        Cut,
    )
    from refit_mx.deadline import (
        Deadline,
    )
    from refit_mx.discovery import (
        SourceSet,
        discover_v2_sources_for_slice,
    )
    from refit_mx.engine.vllm import (
        MxWeightTransferEngine,
    )
    from refit_mx.fleet.client import (
        RefitFleet,
    )
    from refit_mx.manifest import (
        Manifest,
        Registry,
    )
    from refit_mx.plan.planner import (
        Plan,
        plan_reads,
    )
    from refit_mx.plan.shards import (
        ShardTable,
    )
    from refit_mx.plan.target_tensors import (
        TargetPart,
        TargetTensor,
    )
    from refit_mx.plan.targets import (
        expert_targets,
        fused_gate_up_target,
        fused_qkv_target,
        mesh_target,
        replicated_target,
        tp_target,
    )
    from refit_mx.publisher import (
        MxV2TrainingPublisher,
    )
    from refit_mx.received import (
        ReceivedWeights,
        RefitStats,
    )
    from refit_mx.receiver import (
        MxV2RefitReceiver,
    )
    from refit_mx.settings import (
        PublisherSettings,
        ReceiverSettings,
    )
    from refit_mx.shard_sources import (
        LocalShard,
        local_shards,
    )
    from refit_mx.transports.base import (
        Transport,
    )

__all__ = [
    "Box",
    "CompileError",
    "CompilePass",
    "CompileTargetError",
    "ControlAccess",
    "ControlAccessError",
    "ControlClient",
    "ControlError",
    "ControlUnavailableError",
    "Cut",
    "Deadline",
    "DigestMismatchError",
    "EmbeddedControlServer",
    "FencedError",
    "FleetError",
    "LayoutError",
    "LeaseLostError",
    "LocalShard",
    "Manifest",
    "MxV2RefitReceiver",
    "MxV2TrainingPublisher",
    "MxWeightTransferEngine",
    "PhaseError",
    "Plan",
    "ProtocolError",
    "PublisherSettings",
    "ReceivedWeights",
    "ReceiverSettings",
    "RefitConfigError",
    "RefitError",
    "RefitFleet",
    "RefitStats",
    "RefitTimeoutError",
    "Registry",
    "ScratchExhaustedError",
    "ShardTable",
    "SliceRange",
    "SourceLostError",
    "SourceSet",
    "TargetPart",
    "TargetTPLayout",
    "TargetTensor",
    "TensorSpec",
    "Transport",
    "VersionLeasedError",
    "VersionNotFoundError",
    "VersionNotReadyError",
    "compile_pass",
    "discover_v2_sources_for_slice",
    "expert_targets",
    "fused_gate_up_target",
    "fused_qkv_target",
    "intersect",
    "local_shards",
    "mesh_target",
    "patiently",
    "plan_reads",
    "register_compile_pass",
    "replicated_target",
    "tp_target",
]

_LAZY = {
    "CompilePass": "compile.base",
    "ControlAccess": "control.access",
    "ControlClient": "control.client",
    "Cut": "cuts",
    "Deadline": "deadline",
    "EmbeddedControlServer": "control.embedded",
    "LocalShard": "shard_sources",
    "Manifest": "manifest",
    "MxV2RefitReceiver": "receiver",
    "MxV2TrainingPublisher": "publisher",
    "MxWeightTransferEngine": "engine.vllm",
    "Plan": "plan.planner",
    "PublisherSettings": "settings",
    "ReceivedWeights": "received",
    "ReceiverSettings": "settings",
    "RefitFleet": "fleet.client",
    "RefitStats": "received",
    "Registry": "manifest",
    "ShardTable": "plan.shards",
    "SourceSet": "discovery",
    "TargetPart": "plan.target_tensors",
    "TargetTensor": "plan.target_tensors",
    "Transport": "transports.base",
    "compile_pass": "compile.base",
    "discover_v2_sources_for_slice": "discovery",
    "expert_targets": "plan.targets",
    "fused_gate_up_target": "plan.targets",
    "fused_qkv_target": "plan.targets",
    "local_shards": "shard_sources",
    "mesh_target": "plan.targets",
    "patiently": "bounded_control",
    "plan_reads": "plan.planner",
    "register_compile_pass": "compile.base",
    "replicated_target": "plan.targets",
    "tp_target": "plan.targets",
}


# A name to the package that it needs beside those of refit-mx, and what brings that.
_EXTRAS = {
    "MxWeightTransferEngine": ("vllm", "vllm"),
    "RefitFleet": ("httpx", "refit-mx[fleet]"),
}


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ValueError:  # a module that was made by hand
        return True


if not TYPE_CHECKING:  # a star import must not fail for what is not installed
    __all__ = [name for name in __all__ if name not in _EXTRAS or _is_installed(_EXTRAS[name][0])]


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"refit_mx.{_LAZY[name]}"), name)
    except ModuleNotFoundError as error:
        package, install = _EXTRAS.get(name, ("", ""))
        if error.name != package:
            raise
        raise ModuleNotFoundError(
            f"refit_mx.{name} needs the package {package}; install {install}", name=package
        ) from None
