"""Run ModelExpress's own RL clients without CUDA, by replacing private names of version 0.7.

`modelexpress_on_cpu` replaces four things: the accelerator backend of the NIXL transfer, the CUDA
allocator, one ``torch.cuda.synchronize``, and the registry that creates an inference engine
from a context. If another ModelExpress lacks one of the names, an AttributeError names it.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

from refit_mx import Box

# ModelExpress has no types, and its classes have no names before its late import.
Untyped = Any


@dataclass(frozen=True)
class Part:
    """A parameter of the stand-in engine.

    Attributes:
        tensor: tensor of the engine that receives the update. Its dtype is the wire's, bfloat16, or
            one that ModelExpress converts to.
        source: name of the published tensor.
        box: box of the published tensor, as large as ``tensor``.
    """

    tensor: torch.Tensor
    source: str
    box: Box


@contextlib.contextmanager
def modelexpress_on_cpu() -> Iterator[None]:
    """Let ModelExpress's trainer and generator clients work on CPU tensors in this process."""
    with contextlib.ExitStack() as stack:
        for name, attribute, replacement in _SEAMS:
            module = importlib.import_module(name)
            new = replacement(getattr(module, attribute))
            stack.enter_context(mock.patch.object(module, attribute, new))
        yield


def cpu_generator_context(parts: Mapping[str, Part]) -> Untyped:
    """Return a context for ``ModelExpressGeneratorConfig``: an engine made only of tensors.

    Args:
        parts: parts by parameter name.
    """
    from modelexpress_rl.inference.adapter import GeneratorEngineContext

    class CpuGeneratorContext(GeneratorEngineContext):
        def __init__(self) -> None:
            self.refit_mx_parts = dict(parts)

    return CpuGeneratorContext()


def _engine_runtime(parts: Mapping[str, Part]) -> Untyped:
    from modelexpress.refit.reshard.types import CaptureResult, RecordedCopy
    from modelexpress_rl.inference.plan import (
        EngineCapabilities,
        EngineInstaller,
        PreparedEngineTensors,
    )
    from modelexpress_rl.inference.runtime import EngineRuntime, FullTensorEngineCapability

    class CpuInstaller(EngineInstaller):
        @property
        def capabilities(self) -> Untyped:
            return EngineCapabilities(artifact_types=frozenset({PreparedEngineTensors}))

        def install(self, prepared: Untyped) -> None:
            for name, part in parts.items():
                part.tensor.copy_(prepared.staged.tensors[name])

    def capture_layout(
        published: list[tuple[str, torch.dtype, tuple[int, ...]]],
    ) -> tuple[Untyped, dict[str, tuple[tuple[int, ...], torch.dtype]]]:
        known = {name for name, _, _ in published}
        copies = [
            RecordedCopy(
                src_name=part.source,
                op_chain=(("__getitem__", (part.box.slices(),), ()),),
                param_name=name,
                dest_offset=0,
                dest_shape=tuple(part.tensor.shape),
                dest_stride=part.tensor.contiguous().stride(),
                dest_dtype=part.tensor.dtype,
            )
            for name, part in parts.items()
            if part.source in known
        ]
        layout = {
            name: (tuple(part.tensor.shape), part.tensor.dtype) for name, part in parts.items()
        }
        return CaptureResult(copies=copies), layout

    def no_peers(*_: object) -> Untyped:
        raise NotImplementedError("the engine on CPU takes weights from trainers alone")

    return EngineRuntime(
        model_name="cpu",
        installer=CpuInstaller(),
        full_tensor=FullTensorEngineCapability(
            device_id=0,
            device=torch.device("cpu"),
            worker_rank=0,
            capture_layout=capture_layout,
            runtime_tensors=None,
            source_worker_id=None,
            unpublish_runtime_tensors=lambda: None,
            publish_runtime_tensors=lambda _: None,
            build_identity=no_peers,
        ),
    )


class _CpuBackend:
    """ModelExpress's ``AcceleratorBackend`` for memory of the host."""

    name = "cpu"
    torch_device_type = "cpu"
    nixl_mem_type = "DRAM"

    def set_device(self, device_id: int) -> None:
        """Do nothing: there is only one device."""

    def current_device(self) -> int:
        return 0

    def synchronize(self, device_id: int | None = None) -> None:
        """Do nothing: a CPU has no pending work."""

    def empty_cache(self) -> None:
        """Do nothing: there is no cache."""

    def torch_device(self, device_id: int) -> torch.device:
        return torch.device("cpu")

    def is_accel_tensor(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu"

    def supports_rdma_p2p(self) -> bool:
        return True

    def supports_pool_reg(self) -> bool:
        return False

    def supports_vmm(self) -> bool:
        return False

    def supports_gds(self) -> bool:
        return False


class _TorchOnCpu(ModuleType):
    """torch with a ``cuda.synchronize`` that does nothing."""

    cuda = SimpleNamespace(synchronize=lambda device=None: None)

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)


def _create_engine_runtime(original: Callable[[Untyped], Untyped]) -> Callable[[Untyped], Untyped]:
    def create(engine_context: Untyped) -> Untyped:
        parts = getattr(engine_context, "refit_mx_parts", None)
        return original(engine_context) if parts is None else _engine_runtime(parts)

    return create


# Module, name, and a function from the original to its replacement.
_SEAMS: tuple[tuple[str, str, Callable[[Untyped], Untyped]], ...] = (
    ("modelexpress.nixl_transfer", "CudaAcceleratorBackend", lambda _: _CpuBackend),
    (
        "modelexpress_rl.train.engines.fsdp.adapter",
        "classic_cuda_alloc",
        lambda _: contextlib.nullcontext,
    ),
    (
        "modelexpress_rl.inference.nixl_staged_transfer",
        "classic_cuda_alloc",
        lambda _: contextlib.nullcontext,
    ),
    ("modelexpress_rl.inference.nixl_staged_transfer", "torch", lambda _: _TorchOnCpu("torch")),
    ("modelexpress_rl.inference.engines", "_create_engine_runtime", _create_engine_runtime),
)
