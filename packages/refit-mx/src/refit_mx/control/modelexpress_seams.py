"""Run ModelExpress's own RL clients without CUDA: the private seams of 0.7, in one place.

`modelexpress_on_cpu` replaces four things while it lasts: the accelerator backend of the NIXL
transfer, the allocator that asks CUDA for memory, one ``torch.cuda.synchronize``, and the registry
that makes an inference engine of a context. Each is checked first, so that another ModelExpress
fails here with its name and not somewhere with CUDA's.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from refit_mx.errors import RefitConfigError
from refit_mx.tensor_types import Box

# ModelExpress has no types, and its classes cannot be named before it is imported and checked.
Untyped = Any

VERSIONS = ("0.7.",)
"""Of modelexpress, whose seams are known."""


@dataclass(frozen=True)
class Part:
    """What a parameter of the stand-in engine is.

    Attributes:
        tensor: lives in the engine; the update is copied into it. Of the wire's dtype, bfloat16, or
            of one that ModelExpress converts to.
        source: name of the published tensor.
        box: of the published tensor, as large as ``tensor``.
    """

    tensor: torch.Tensor
    source: str
    box: Box


def check_modelexpress() -> None:
    """Return if the installed ModelExpress has the seams that this module replaces.

    Raises:
        RefitConfigError: it is of another version, or a seam is not as expected; names it.
    """
    version = importlib.metadata.version("modelexpress")
    if not version.startswith(VERSIONS):
        raise RefitConfigError(
            f"modelexpress {version}: its seams are known for {', '.join(VERSIONS)}*"
        )
    for seam in _SEAMS:
        module = importlib.import_module(seam.module)
        found = getattr(module, seam.name, None)
        if found is None:
            raise RefitConfigError(f"modelexpress {version}: {seam} is not there")
        if seam.parameters is not None:
            parameters = tuple(inspect.signature(found).parameters)
            if parameters != seam.parameters:
                raise RefitConfigError(
                    f"modelexpress {version}: {seam} takes {parameters}; expected {seam.parameters}"
                )


@contextlib.contextmanager
def modelexpress_on_cpu() -> Iterator[None]:
    """While it lasts, ModelExpress's trainer and generator clients work on CPU tensors.

    For the whole process, so do not use ModelExpress with CUDA meanwhile.

    Raises:
        RefitConfigError: see `check_modelexpress`.
    """
    check_modelexpress()
    replaced = []
    try:
        for seam in _SEAMS:
            if seam.replacement is None:
                continue
            module = importlib.import_module(seam.module)
            replaced.append((module, seam.name, getattr(module, seam.name)))
            setattr(module, seam.name, seam.replacement(getattr(module, seam.name)))
        yield
    finally:
        for module, name, original in reversed(replaced):
            setattr(module, name, original)


def cpu_generator_context(parts: Mapping[str, Part]) -> Untyped:
    """A context for ``ModelExpressGeneratorConfig``: an engine that is nothing but tensors.

    Args:
        parts: by name of the parameter.

    Raises:
        ValueError: a box is not of its tensor's shape.
    """
    from modelexpress_rl.inference.adapter import GeneratorEngineContext

    for name, part in parts.items():
        if part.box.shape != tuple(part.tensor.shape):
            raise ValueError(f"{name}: box of shape {part.box.shape} for {part.tensor.shape}")

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
        """There is one."""

    def current_device(self) -> int:
        return 0

    def synchronize(self, device_id: int | None = None) -> None:
        """Nothing is under way on a CPU."""

    def empty_cache(self) -> None:
        """There is none."""

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
    """torch, with a ``cuda.synchronize`` that has nothing to wait for."""

    cuda = SimpleNamespace(synchronize=lambda device=None: None)

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)


def _create_engine_runtime(original: Callable[[Untyped], Untyped]) -> Callable[[Untyped], Untyped]:
    def create(engine_context: Untyped) -> Untyped:
        parts = getattr(engine_context, "refit_mx_parts", None)
        return original(engine_context) if parts is None else _engine_runtime(parts)

    return create


@dataclass(frozen=True)
class _Seam:
    module: str
    name: str
    # Of the function or class; None where it is a module.
    parameters: tuple[str, ...] | None
    # Makes the replacement of the original; None where the seam is only relied on.
    replacement: Callable[[Untyped], Untyped] | None

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


_SEAMS = (
    _Seam("modelexpress.nixl_transfer", "CudaAcceleratorBackend", (), lambda _: _CpuBackend),
    _Seam(
        "modelexpress.nixl_transfer",
        "NixlTransferManager",
        ("agent_name", "device_id", "listen_port", "accelerator_backend"),
        None,
    ),
    _Seam(
        "modelexpress_rl.train.engines.fsdp.adapter",
        "classic_cuda_alloc",
        (),
        lambda _: contextlib.nullcontext,
    ),
    _Seam(
        "modelexpress_rl.inference.nixl_staged_transfer",
        "classic_cuda_alloc",
        (),
        lambda _: contextlib.nullcontext,
    ),
    _Seam(
        "modelexpress_rl.inference.nixl_staged_transfer",
        "torch",
        None,
        lambda _: _TorchOnCpu("torch"),
    ),
    _Seam(
        "modelexpress_rl.inference.engines",
        "_create_engine_runtime",
        ("engine_context",),
        _create_engine_runtime,
    ),
    _Seam(
        "modelexpress_rl.inference.runtime",
        "EngineRuntime",
        ("model_name", "installer", "full_tensor"),
        None,
    ),
    _Seam(
        "modelexpress_rl.inference.runtime",
        "FullTensorEngineCapability",
        (
            "device_id",
            "device",
            "worker_rank",
            "capture_layout",
            "runtime_tensors",
            "source_worker_id",
            "unpublish_runtime_tensors",
            "publish_runtime_tensors",
            "build_identity",
            "nixl_manager",
        ),
        None,
    ),
    _Seam(
        "modelexpress.refit.reshard.types",
        "RecordedCopy",
        (
            "src_name",
            "op_chain",
            "param_name",
            "dest_offset",
            "dest_shape",
            "dest_stride",
            "dest_dtype",
        ),
        None,
    ),
)
