"""Refit: publish new weights from trainers and fetch them into every generator.

A generator serves exactly the version that it requested, and never a mix of two.

Importing this package imports neither torch nor gRPC. A name that needs them is loaded on first
use, from the module given in the imports for type checkers below.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pkgutil import get_data
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
    SourceError,
    SourceLostError,
    VersionLeasedError,
    VersionNotFoundError,
    VersionNotReadyError,
)
from refit_mx.layout import Box, SliceRange, TargetTPLayout, TensorSpec, intersect

if TYPE_CHECKING:
    from refit_mx.compile.base import CompilePass, compile_pass, register_compile_pass
    from refit_mx.control.access import ControlAccess
    from refit_mx.control.client import ControlClient
    from refit_mx.control.embedded import EmbeddedControlServer
    from refit_mx.control.retry import retry_idempotent
    from refit_mx.deadline import Deadline
    from refit_mx.engine.vllm import MxWeightTransferEngine
    from refit_mx.fleet.client import FleetStats, RefitFleet
    from refit_mx.manifest.format import Manifest, Registry
    from refit_mx.plan.planner import Plan, plan_reads
    from refit_mx.plan.shards import ShardTable
    from refit_mx.plan.target_tensors import TargetPart, TargetTensor
    from refit_mx.plan.targets import (
        fused_gate_up_target,
        fused_qkv_target,
        mesh_target,
        replicated_target,
        stacked_experts_target,
        tp_target,
    )
    from refit_mx.receive.discovery import SourceSet, discover_v2_sources_for_slice
    from refit_mx.receive.received import ReceivedWeights, RefitStats
    from refit_mx.receive.receiver import MxV2RefitReceiver
    from refit_mx.settings import PublisherSettings, ReceiverSettings
    from refit_mx.source.publisher import MxV2TrainingPublisher
    from refit_mx.source.shards import Cut, LocalShard, local_shards
    from refit_mx.transports.base import Transport

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
    "FleetStats",
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
    "SourceError",
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
    "fused_gate_up_target",
    "fused_qkv_target",
    "intersect",
    "local_shards",
    "mesh_target",
    "plan_reads",
    "register_compile_pass",
    "replicated_target",
    "retry_idempotent",
    "stacked_experts_target",
    "tp_target",
]

# The additional package that a name needs, and the requirement that installs it.
_EXTRAS = {
    "MxWeightTransferEngine": ("vllm", "vllm"),
    "FleetStats": ("httpx", "refit-mx[fleet]"),
    "RefitFleet": ("httpx", "refit-mx[fleet]"),
}


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ValueError:  # a module without a spec, created by hand
        return True


if not TYPE_CHECKING:  # a star import must not fail for a package that is not installed
    __all__ = [name for name in __all__ if name not in _EXTRAS or _is_installed(_EXTRAS[name][0])]


@cache
def _modules() -> dict[str, str]:
    """Return the module of each lazy name, read from the imports for type checkers."""
    import ast

    tree = ast.parse(get_data(__name__, "__init__.py") or b"")
    return {
        alias.name: node.module or ""
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def __getattr__(name: str) -> object:
    module = _modules().get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        package, install = _EXTRAS.get(name, ("", ""))
        if error.name != package:
            raise
        raise ModuleNotFoundError(
            f"refit_mx.{name} needs the package {package}; install {install}", name=package
        ) from None
