"""Programs that tests of faults run in other processes, and their `Process` in the test.

A program reads commands from standard input, one JSON object a line, and prints its answers.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import sys
import threading
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import forked_processes

if TYPE_CHECKING:
    import torch

WAIT_S = 60.0
"""Timeout for a start or an answer of a process, with a large margin."""

SHAPES = {
    "embed": ("float32", (96, 40)),
    "layers.0.up": ("float32", (64, 33)),
    "layers.0.norm": ("float32", (33,)),
    "scale": ("float32", ()),
}


def weights(seed: int, shapes: dict[str, tuple[str, tuple[int, ...]]] = SHAPES) -> dict[str, Any]:
    """Return the full tensors of a seed: the same in every process."""
    import torch

    tensors = {}
    for name, (dtype, shape) in shapes.items():
        generator = torch.Generator().manual_seed(seed * 1_000_003 + zlib.crc32(name.encode()))
        tensor = torch.randn(shape, generator=generator, dtype=torch.float32)
        tensors[name] = tensor.to(getattr(torch, dtype))
    return tensors


def moved(tensors: dict[str, torch.Tensor], device: str) -> dict[str, torch.Tensor]:
    """Return tensors on a device."""
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def rows_of(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """Return first row and stop row of a rank, divided like torch.chunk."""
    step = -(-size // ranks)
    return min(rank * step, size), min((rank + 1) * step, size)


def fsdp_shards(complete: dict[str, torch.Tensor], ranks: int, rank: int) -> list[Any]:
    """Return a rank's shards along the first axis; tensors without axes belong to rank 0."""
    from refit_mx import Box, LocalShard

    shards = []
    for name, tensor in complete.items():
        shape = tuple(tensor.shape)
        if not shape:
            if rank == 0:
                shards.append(LocalShard.full(name, tensor))
            continue
        first, stop = rows_of(shape[0], ranks, rank)
        box = Box((first, *[0] * (len(shape) - 1)), (stop - first, *shape[1:]))
        shards.append(LocalShard(name, shape, box, tensor[first:stop]))
    return shards


def targets_of(
    shapes: dict[str, tuple[str, tuple[int, ...]]] = SHAPES,
    *,
    axis: int = 0,
    ranks: int = 1,
    rank: int = 0,
) -> list[Any]:
    """Return a tensor-parallel receiver's targets; tensors without that axis are replicated."""
    from refit_mx import TargetTPLayout, TensorSpec, replicated_target, tp_target

    targets = []
    for name, (dtype, shape) in shapes.items():
        spec = TensorSpec(name, dtype, shape)
        if axis < len(shape):
            targets.append(tp_target(spec, TargetTPLayout(ranks, rank, axis)))
        else:
            targets.append(replicated_target(spec))
    return targets


def slice_of(
    complete: dict[str, torch.Tensor], *, axis: int = 0, ranks: int = 1, rank: int = 0
) -> dict[str, torch.Tensor]:
    """Return the content that a receiver of `targets_of` must get."""
    slices = {}
    for name, tensor in complete.items():
        if axis < tensor.dim():
            first, stop = rows_of(tensor.shape[axis], ranks, rank)
            tensor = tensor.narrow(axis, first, stop - first)
        slices[name] = tensor.contiguous()
    return slices


def fp8_pass() -> Any:
    """Return a compile pass for the tensor ``large`` only."""
    from refit_mx import compile_pass

    return compile_pass("deep_gemm_fp8", selection=lambda spec: spec.name == "large")


def fp8(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors with the outputs of `fp8_pass` in place of its inputs."""
    from refit_mx import TensorSpec
    from refit_mx.compile.base import allocate_outputs

    specs = [
        TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in tensors.items()
    ]
    outputs = allocate_outputs(fp8_pass(), specs)
    fp8_pass().run(tensors, outputs)
    return tensors | outputs


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Return whether all tensors are equal byte for byte."""
    import torch

    return left.keys() == right.keys() and all(
        left[name].shape == right[name].shape
        and left[name].dtype == right[name].dtype
        and torch.equal(
            left[name].contiguous().reshape(-1).view(torch.uint8),
            right[name].contiguous().reshape(-1).view(torch.uint8),
        )
        for name in left
    )


def checksum(tensor: torch.Tensor) -> int:
    """Return the CRC-32 of a tensor's bytes."""
    import torch

    return zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


class Process:
    """A process that runs one of the programs below.

    Args:
        kind: ``publisher``, ``receiver``, ``control`` or ``soak``.
        settings: settings of the program.
    """

    def __init__(self, kind: str, **settings: object) -> None:
        self._process = forked_processes.start("refit_processes", kind, json.dumps(settings))
        self.pid = self._process.pid
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.ready = self.answer()

    def _read(self) -> None:
        for line in self._process.stdout:
            with contextlib.suppress(ValueError):
                self._answers.put(json.loads(line))
        self._answers.put(None)

    def send(self, **command: object) -> None:
        """Send a command without waiting for its answer."""
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def answer(self, timeout_s: float = WAIT_S) -> dict[str, Any]:
        """Return the next answer."""
        received = self._answers.get(timeout=timeout_s)
        assert received is not None, f"the process {self.pid} ended"
        return received

    def ask(self, timeout_s: float = WAIT_S, **command: object) -> dict[str, Any]:
        """Send a command and return its answer."""
        self.send(**command)
        return self.answer(timeout_s)

    def signal(self, number: signal.Signals) -> None:
        """Signal the process; wait until it is dead or all its threads have stopped."""
        os.kill(self.pid, number)
        if number == signal.SIGKILL:
            self._process.wait(WAIT_S)
        elif number == signal.SIGSTOP:
            os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def wait(self) -> int:
        """Wait for its end and return its exit code."""
        return self._process.wait(WAIT_S)

    def end(self) -> int:
        """Close its standard input, so that it exits; return its exit code."""
        self._process.stdin.close()
        return self.wait()

    @property
    def descriptors(self) -> tuple[int, int]:
        """Descriptors of its pipes in this process."""
        return self._process.stdin.fileno(), self._process.stdout.fileno()

    def close(self) -> None:
        """Kill it in any state, and close its pipes."""
        if self._process.poll() is None:
            os.kill(self.pid, signal.SIGCONT)
            self._process.kill()
        self._process.wait(WAIT_S)
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()


def _say(**answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def _command() -> dict[str, Any] | None:
    line = sys.stdin.readline()
    return json.loads(line) if line else None


class _Pauses:
    """A phase hook that blocks once at each phase in ``at``, until the command "go"."""

    def __init__(self) -> None:
        self.at: set[str] = set()

    def __call__(self, name: str) -> None:
        if name in self.at:
            self.at.discard(name)
            _say(phase=name)
            command = _command()
            assert command == {"do": "go"}, command


def _failed(error: BaseException) -> None:
    _say(
        error=type(error).__name__, message=str(error), retryable=getattr(error, "retryable", None)
    )


def _publisher(settings: dict[str, Any]) -> None:
    from refit_mx import MxV2TrainingPublisher, RefitError

    pauses = _Pauses()
    publisher = MxV2TrainingPublisher(
        settings["model"],
        settings.get("slot", "fsdp-0"),
        control=settings["control"],
        transports=settings.get("transports"),
        device=settings.get("device", "cpu"),
        heartbeat_ttl_s=settings.get("ttl_s", 15.0),
        on_phase=pauses,
    )
    _say(ready=True, worker=publisher.worker_id)
    shapes = settings.get("shapes") or SHAPES
    shapes = {name: (dtype, tuple(shape)) for name, (dtype, shape) in shapes.items()}
    while (command := _command()) is not None:
        pauses.at = set(command.get("pause", ()))
        started = time.monotonic()
        try:
            if command["do"] == "publish":
                complete = moved(weights(command["seed"], shapes), settings.get("device", "cpu"))
                shards = fsdp_shards(complete, settings.get("ranks", 1), settings.get("rank", 0))
                publisher.publish(
                    command["version"], shards, timeout_s=command.get("timeout_s", 30.0)
                )
            elif command["do"] == "release":
                publisher.release(command["version"], timeout_s=command.get("timeout_s", 30.0))
            elif command["do"] == "close":
                publisher.close()
            else:
                raise AssertionError(command)
        except RefitError as error:
            _failed(error)
        else:
            _say(done=command["do"], seconds=time.monotonic() - started)
    publisher.close()


def _receiver(settings: dict[str, Any]) -> None:
    import torch

    from refit_mx import MxV2RefitReceiver, ReceiverSettings, RefitError

    pauses = _Pauses()
    shapes = settings.get("shapes") or SHAPES
    shapes = {name: (dtype, tuple(shape)) for name, (dtype, shape) in shapes.items()}
    layout = {key: settings[key] for key in ("axis", "ranks", "rank") if key in settings}
    targets = targets_of(shapes, **layout)
    transport: Any = settings.get("transport", "tcp")
    if settings.get("halfway"):
        import pytest
        from refit_fixtures import Halfway, new_transport, small_batches

        small_batches(pytest.MonkeyPatch(), 1 << 18)
        transport = Halfway(new_transport(transport), pauses)
    receiver = MxV2RefitReceiver(
        settings["model"],
        control=settings["control"],
        targets=targets,
        transport=transport,
        rank=settings.get("rank", 0),
        device=settings.get("device", "cpu"),
        settings=ReceiverSettings(**settings.get("settings", {})),
        on_phase=pauses,
    )
    live = {
        target.name: torch.zeros(target.shape, dtype=getattr(torch, target.dtype))
        for target in targets
    }
    live = moved(live, settings.get("device", "cpu"))
    compile_pass = fp8_pass() if settings.get("compile") else None
    if compile_pass is not None:
        live = fp8(live)
    _say(ready=True, worker=receiver.worker_id)
    while (command := _command()) is not None:
        pauses.at = set(command.get("pause", ()))
        try:
            if command["do"] == "refit":
                stats = receiver.refit(
                    command["version"],
                    live,
                    compile_pass,
                    timeout_s=command.get("timeout_s", 30.0),
                )
                _say(
                    done="refit",
                    nbytes=stats.nbytes,
                    attempts=stats.attempts,
                    transport=stats.transport,
                )
            elif command["do"] == "holds":
                expected = slice_of(weights(command["seed"], shapes), **layout)
                held = moved(live, "cpu")
                _say(same=same(held, fp8(expected) if compile_pass else expected))
            elif command["do"] == "sums":
                _say(sums={name: checksum(tensor) for name, tensor in live.items()})
            else:
                raise AssertionError(command)
        except RefitError as error:
            _failed(error)
    receiver.close()


def _control(settings: dict[str, Any]) -> None:
    from refit_mx import EmbeddedControlServer
    from refit_mx.control import Limits, SqliteStore

    store = SqliteStore(Path(settings["state"])) if settings.get("state") else None
    limits = Limits(retention=settings.get("retention", 2))
    with EmbeddedControlServer(port=settings.get("port", 0), store=store, limits=limits) as server:
        _say(ready=True, address=server.address)
        while _command() is not None:
            _say(leases=server.plane.counts().leases)


def _soak(_: dict[str, Any]) -> None:
    from soak_processes import Publishing

    from refit_mx import RefitError

    publishing = Publishing()
    _say(ready=True)
    while (command := _command()) is not None:
        try:
            _say(done=True, **getattr(publishing, command.pop("do"))(**command))
        except RefitError as error:
            _failed(error)
    publishing.close()


def main(kind: str, settings: str) -> None:
    """Run a program with JSON settings."""
    programs = {
        "publisher": _publisher,
        "receiver": _receiver,
        "control": _control,
        "soak": _soak,
    }
    programs[kind](json.loads(settings))
