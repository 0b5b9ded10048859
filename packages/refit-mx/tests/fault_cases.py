"""What the tests of faults share: phases, signals, and one refit that may fail.

Each time: an error of ours within the deadline or the version that was asked for, never anything in
between; and the same call made again succeeds once the fault is gone. Phases are reached by a hook,
so nothing here depends on time.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from refit_fixtures import MODEL, TRANSPORTS, Halfway, Hook, new_transport
from refit_processes import Process, fp8, fp8_pass, same, slice_of, targets_of, weights

from refit_mx.errors import RefitError
from refit_mx.receiver import MxV2RefitReceiver
from refit_mx.settings import ReceiverSettings

# 12 MB: more than the buffers of a connection, so that a stopped source really stops a transfer.
SHAPES = {"large": ("float32", (1500, 2000)), "norm": ("float32", (333,)), "scale": ("float32", ())}
COLUMNS = {"axis": 1, "ranks": 2, "rank": 1}
"""What has to be asked for, so that the sources are needed in the phase of verifying, too."""
DEADLINE_S = 6.0
SLACK_S = 4.0
"""For giving up, on a machine that does five other things."""
SIGNALS = [signal.SIGKILL, signal.SIGSTOP]
RECEIVER_PHASES = ("lease", "discover", "plan", "transfer", "part", "verify", "compile", "install")
PUBLISHER_PHASES = ("stage", "serve", "offer")


def matrix(phases: Sequence[str], *, over_nixl: Collection[str]) -> list[Any]:
    """Pairs of transport and phase: over TCP all, over NIXL those where it has a part in the phase;
    the rest is left to `make test-long`."""
    pairs = []
    for transport in TRANSPORTS:
        (name,) = getattr(transport, "values", (transport,))
        for phase in phases:
            often = name == "tcp" or (name == "nixl" and phase in over_nixl)
            marks = [*getattr(transport, "marks", ()), *[pytest.mark.long] * (not often)]
            pairs.append(pytest.param(name, phase, marks=marks))
    return pairs


def a_publisher(stack: ExitStack, control: str, transport: str, **options: Any) -> Process:
    """A publisher in a process, which a test may stop or kill."""
    made = Process(
        "publisher",
        model=MODEL,
        control=control,
        transports=[transport],
        shapes=SHAPES,
        **options,
    )
    stack.callback(made.close)
    return made


def a_receiver(
    stack: ExitStack, address: str, transport: str, **settings: Any
) -> tuple[MxV2RefitReceiver, Hook]:
    hook = Hook()
    inner = new_transport(transport)
    stack.callback(inner.close)
    receiver = MxV2RefitReceiver(
        MODEL,
        control=address,
        targets=targets_of(SHAPES, **COLUMNS),
        transport=Halfway(inner, hook),
        settings=ReceiverSettings(manifest_timeout_s=1.0, rpc_timeout_s=3.0, **settings),
        on_phase=hook,
    )
    stack.enter_context(receiver)
    return receiver, hook


def zeros(phase: str = "") -> dict[str, torch.Tensor]:
    """Live weights; of the phase of compiling, those of a compile pass."""
    live = {
        target.name: torch.zeros(target.shape, dtype=getattr(torch, target.dtype))
        for target in targets_of(SHAPES, **COLUMNS)
    }
    return fp8(live) if phase == "compile" else live


def of(seed: int, phase: str = "") -> dict[str, torch.Tensor]:
    """What `zeros` become."""
    found = slice_of(weights(seed, SHAPES), **COLUMNS)
    return fp8(found) if phase == "compile" else found


def attempt(
    receiver: MxV2RefitReceiver, version: str, live: dict[str, torch.Tensor], phase: str = ""
) -> Any:
    """Refit; the error if there was one. Whatever happened, nothing is half way."""
    before = {name: tensor.clone() for name, tensor in live.items()}
    compile_pass = fp8_pass() if phase == "compile" else None
    started = time.monotonic()
    error = None
    try:
        receiver.refit(version, live, compile_pass, timeout_s=DEADLINE_S)
    except RefitError as raised:
        error = raised
    assert time.monotonic() - started < DEADLINE_S + SLACK_S
    assert not receiver.fenced
    if error is not None:
        assert same(live, before)
    return error
