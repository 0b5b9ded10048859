"""Helpers for tests of faults: phases, signals, and a refit that may fail.

A refit raises a `RefitError` within the deadline or installs the requested version, and nothing in
between. A retry succeeds after the fault. A hook runs at each phase, so no test depends on timing.
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

from refit_mx import ControlClient, MxV2RefitReceiver, ReceiverSettings, RefitError

# 12 MB, more than a connection's buffers, so that a stopped source also stops a transfer.
SHAPES = {"large": ("float32", (1500, 2000)), "norm": ("float32", (333,)), "scale": ("float32", ())}
COLUMNS = {"axis": 1, "ranks": 2, "rank": 1}
"""Layout of the targets: strided reads, so that verifying needs the sources too."""
DEADLINE_S = 6.0
SLACK_S = 4.0
"""Time allowed after the deadline, on a loaded machine."""
RECOVERY_S = 20.0
"""Deadline of a refit after a fault: a channel waits longer after each failed connection."""
SIGNALS = [signal.SIGKILL, signal.SIGSTOP]
RECEIVER_PHASES = ("lease", "discover", "plan", "transfer", "part", "verify", "compile", "install")
PUBLISHER_PHASES = ("stage", "serve", "register")


def matrix(phases: Sequence[str], *, over_nixl: Collection[str]) -> list[Any]:
    """Return pairs of transport and phase; some are `long`.

    All phases over TCP, and the phases ``over_nixl`` over NIXL, are not `long`.
    """
    pairs = []
    for transport in TRANSPORTS:
        (name,) = getattr(transport, "values", (transport,))
        for phase in phases:
            quick = name == "tcp" or (name == "nixl" and phase in over_nixl)
            marks = [*getattr(transport, "marks", ()), *[pytest.mark.long] * (not quick)]
            pairs.append(pytest.param(name, phase, marks=marks))
    return pairs


def a_publisher(stack: ExitStack, control: str, transport: str, **options: Any) -> Process:
    """Start a publisher in a process, which a test may stop or kill."""
    process = Process(
        "publisher",
        model=MODEL,
        control=control,
        transports=[transport],
        shapes=SHAPES,
        **options,
    )
    stack.callback(process.close)
    return process


def a_receiver(
    stack: ExitStack, address: str, transport: str, **settings: Any
) -> tuple[MxV2RefitReceiver, Hook]:
    hook = Hook()
    inner = new_transport(transport)
    stack.callback(inner.close)
    control = stack.enter_context(ControlClient(address))
    receiver = MxV2RefitReceiver(
        MODEL,
        control=control,
        targets=targets_of(SHAPES, **COLUMNS),
        transport=Halfway(inner, hook),
        settings=ReceiverSettings(manifest_timeout_s=1.0, **settings),
        on_phase=hook,
    )
    # Only for calls during faults: on a busy machine, the registration may take longer.
    control.rpc_timeout_s = 3.0
    stack.enter_context(receiver)
    return receiver, hook


def zeros(phase: str = "") -> dict[str, torch.Tensor]:
    """Return zeroed live weights; in phase "compile" with the outputs of the compile pass."""
    live = {
        target.name: torch.zeros(target.shape, dtype=getattr(torch, target.dtype))
        for target in targets_of(SHAPES, **COLUMNS)
    }
    return fp8(live) if phase == "compile" else live


def live_after(seed: int, phase: str = "") -> dict[str, torch.Tensor]:
    """Return the live weights expected after a refit to a seed."""
    live = slice_of(weights(seed, SHAPES), **COLUMNS)
    return fp8(live) if phase == "compile" else live


def attempt(
    receiver: MxV2RefitReceiver,
    version: str,
    live: dict[str, torch.Tensor],
    phase: str = "",
    *,
    deadline_s: float = DEADLINE_S,
) -> Any:
    """Refit and return the error, if any; check that a failed refit changed nothing."""
    before = {name: tensor.clone() for name, tensor in live.items()}
    compile_pass = fp8_pass() if phase == "compile" else None
    started = time.monotonic()
    error = None
    try:
        receiver.refit(version, live, compile_pass, timeout_s=deadline_s)
    except RefitError as raised:
        error = raised
    assert time.monotonic() - started < deadline_s + SLACK_S
    assert not receiver.fenced
    if error is not None:
        assert same(live, before)
    return error
