"""Refit: publish new weights from trainers and fetch them into every generator.

A generator serves exactly the version that it requested, and never a mix of two.

Importing this package imports neither torch nor gRPC: each public name is loaded on first use.
"""

from __future__ import annotations

import ast
from importlib import import_module
from importlib.util import find_spec
from pkgutil import get_data
from typing import TYPE_CHECKING

# The public names. "as" makes a name public for type checkers; at run time `_MODULES` has them.
if TYPE_CHECKING:
    from refit_mx.compile.base import CompilePass as CompilePass
    from refit_mx.compile.base import compile_pass as compile_pass
    from refit_mx.compile.base import register_compile_pass as register_compile_pass
    from refit_mx.control.access import ControlAccess as ControlAccess
    from refit_mx.control.client import ControlClient as ControlClient
    from refit_mx.control.embedded import EmbeddedControlServer as EmbeddedControlServer
    from refit_mx.control.retry import retry_idempotent as retry_idempotent
    from refit_mx.deadline import Deadline as Deadline
    from refit_mx.engine.vllm import MxWeightTransferEngine as MxWeightTransferEngine
    from refit_mx.errors import CompileError as CompileError
    from refit_mx.errors import CompileTargetError as CompileTargetError
    from refit_mx.errors import ControlAccessError as ControlAccessError
    from refit_mx.errors import ControlError as ControlError
    from refit_mx.errors import ControlUnavailableError as ControlUnavailableError
    from refit_mx.errors import DigestMismatchError as DigestMismatchError
    from refit_mx.errors import FencedError as FencedError
    from refit_mx.errors import FleetError as FleetError
    from refit_mx.errors import LayoutError as LayoutError
    from refit_mx.errors import LeaseLostError as LeaseLostError
    from refit_mx.errors import PhaseError as PhaseError
    from refit_mx.errors import ProtocolError as ProtocolError
    from refit_mx.errors import RefitConfigError as RefitConfigError
    from refit_mx.errors import RefitError as RefitError
    from refit_mx.errors import RefitTimeoutError as RefitTimeoutError
    from refit_mx.errors import ScratchExhaustedError as ScratchExhaustedError
    from refit_mx.errors import SourceError as SourceError
    from refit_mx.errors import SourceLostError as SourceLostError
    from refit_mx.errors import VersionLeasedError as VersionLeasedError
    from refit_mx.errors import VersionNotFoundError as VersionNotFoundError
    from refit_mx.errors import VersionNotReadyError as VersionNotReadyError
    from refit_mx.fleet.client import FleetStats as FleetStats
    from refit_mx.fleet.client import RefitFleet as RefitFleet
    from refit_mx.layout import Box as Box
    from refit_mx.layout import SliceRange as SliceRange
    from refit_mx.layout import TargetTPLayout as TargetTPLayout
    from refit_mx.layout import TensorSpec as TensorSpec
    from refit_mx.layout import intersect as intersect
    from refit_mx.manifest.format import Manifest as Manifest
    from refit_mx.manifest.format import Registry as Registry
    from refit_mx.plan.planner import Plan as Plan
    from refit_mx.plan.planner import plan_reads as plan_reads
    from refit_mx.plan.shards import ShardTable as ShardTable
    from refit_mx.plan.target_tensors import TargetPart as TargetPart
    from refit_mx.plan.target_tensors import TargetTensor as TargetTensor
    from refit_mx.plan.targets import fused_gate_up_target as fused_gate_up_target
    from refit_mx.plan.targets import fused_qkv_target as fused_qkv_target
    from refit_mx.plan.targets import mesh_target as mesh_target
    from refit_mx.plan.targets import replicated_target as replicated_target
    from refit_mx.plan.targets import stacked_experts_target as stacked_experts_target
    from refit_mx.plan.targets import tp_target as tp_target
    from refit_mx.receive.discovery import SourceSet as SourceSet
    from refit_mx.receive.discovery import (
        discover_v2_sources_for_slice as discover_v2_sources_for_slice,
    )
    from refit_mx.receive.received import ReceivedWeights as ReceivedWeights
    from refit_mx.receive.received import RefitStats as RefitStats
    from refit_mx.receive.receiver import MxV2RefitReceiver as MxV2RefitReceiver
    from refit_mx.settings import PublisherSettings as PublisherSettings
    from refit_mx.settings import ReceiverSettings as ReceiverSettings
    from refit_mx.source.publisher import MxV2TrainingPublisher as MxV2TrainingPublisher
    from refit_mx.source.shards import Cut as Cut
    from refit_mx.source.shards import LocalShard as LocalShard
    from refit_mx.source.shards import local_shards as local_shards
    from refit_mx.transports.base import Transport as Transport

# The module of each public name, read from the imports above.
_MODULES = {
    alias.name: node.module or ""
    for block in ast.parse(get_data(__name__, "__init__.py") or b"").body
    if isinstance(block, ast.If)
    for node in block.body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}

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


if not TYPE_CHECKING:
    # A star import must not fail for a package that is not installed.
    __all__ = sorted(
        name for name in _MODULES if name not in _EXTRAS or _is_installed(_EXTRAS[name][0])
    )


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_MODULES[name]), name)
    except ModuleNotFoundError as error:
        package, install = _EXTRAS.get(name, ("", ""))
        if error.name != package:
            raise
        raise ModuleNotFoundError(
            f"refit_mx.{name} needs the package {package}; install {install}", name=package
        ) from None
