"""The NIXL library, which may be missing and reads its settings from the environment."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any  # NIXL's modules and agents have no types

from refit_mx.errors import RefitConfigError

# In modelexpress's order of preference: a second build cannot be loaded into a process.
_PACKAGES = ("nixl_cu13", "nixl_cu12", "nixl")
_RDMA = Path("/sys/class/infiniband")
# Checked without CUDA: a process cannot use CUDA if its parent has initialized it before the fork.
_GPU = Path("/dev/nvidiactl")
_POLL_US = 1000
# Modules that bundle their own gRPC and protobuf, which conflict with NIXL's.
_CONFLICTING_MODULES = ("yr.datasystem",)
_agent_lock = threading.Lock()


def prepare_environment() -> None:
    """Set the environment variables that NIXL reads at import, unless the user has set them.

    Without RDMA these are ``UCX_TLS=tcp,shm,self``, with ``,cuda`` if there is a GPU, and
    ``UCX_MODULES=^ib``; without the latter a process crashes at exit if the system has libibverbs.
    With RDMA they are not set, since they would disable it. ``NIXL_LOG_LEVEL=WARN`` is set in
    either case, as NIXL logs to stdout. Nothing happens once NIXL is imported.
    """
    if any(f"{package}._api" in sys.modules for package in _PACKAGES):
        return
    if not has_rdma():
        # UCX warns about a transport without its device.
        cuda = ",cuda" if _GPU.exists() else ""
        os.environ.setdefault("UCX_TLS", f"tcp,shm,self{cuda}")
        os.environ.setdefault("UCX_MODULES", "^ib")
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")


def has_rdma() -> bool:
    """Return whether this machine has an RDMA device; without one, UCX copies with the CPU."""
    return _RDMA.is_dir() and any(_RDMA.iterdir())


def nixl_obstacle() -> str | None:
    """Return the reason why NIXL cannot be used, None if it can."""
    for other in _CONFLICTING_MODULES:
        if other in sys.modules:
            return f"this process has loaded {other}, whose libraries crash together with NIXL's"
    if not sys.platform.startswith("linux"):
        return f"NIXL has no build for {sys.platform}"
    try:
        _api()
    except ImportError as error:
        return (
            f"NIXL cannot be imported ({error}); install refit-mx[nixl], or refit-mx[nixl-cu13] "
            "where torch is a build for CUDA 13"
        )
    return None


def new_agent(prefix: str, *, serves: bool) -> Any:  # Any: see the import
    """Create a UCX agent with a name that no other process ever has.

    If others read from it, it ``serves`` and needs a progress thread. Otherwise it makes progress
    when its transfers are polled.

    Raises:
        RefitConfigError: NIXL is missing, or lacks UCX.
    """
    why = nixl_obstacle()
    if why is not None:
        raise RefitConfigError(why)
    api = _api()
    config = api.nixl_agent_config(enable_prog_thread=serves, num_threads=0, backends=["UCX"])
    with _sleeping_thread(api):
        agent = api.nixl_agent(f"{prefix}-{uuid.uuid4().hex}", config)
    if "UCX" not in agent.backends:
        raise RefitConfigError("NIXL's plugin UCX is missing; see NIXL_PLUGIN_DIR")
    return agent


@contextmanager
def _sleeping_thread(api: Any) -> Iterator[None]:  # Any: see the import
    """Make the thread of an agent created in the block sleep between polls.

    By default NIXL's Python API polls without a pause. That uses a core for as long as the agent
    exists, and slows transfers if cores are few. Only the bindings below that API have the setting.
    """
    bindings: Any = getattr(api, "nixlBind", None)  # Any: see the import
    plain = getattr(bindings, "nixlAgentConfig", None)
    if plain is None or not hasattr(plain, "pthrDelay"):
        yield
        return

    def set_attribute(config: Any, name: str, value: object) -> None:
        plain.__setattr__(config, name, _POLL_US if name == "pthrDelay" else value)

    sleeping = type("SleepingConfig", (plain,), {"__setattr__": set_attribute})
    with _agent_lock:
        bindings.nixlAgentConfig = sleeping
        try:
            yield
        finally:
            bindings.nixlAgentConfig = plain


def is_disconnect(error: BaseException) -> bool:
    """Return whether NIXL reports a lost connection, after which no byte arrives."""
    return type(error).__name__ == "nixlRemoteDisconnectError"


def is_unreachable(error: BaseException) -> bool:
    """Return whether NIXL could not connect to a peer with valid metadata."""
    return is_disconnect(error) or type(error).__name__ == "nixlBackendError"


@cache
def _api() -> Any:  # Any: see the import
    prepare_environment()
    missing: list[str] = []
    raising = logging.raiseExceptions
    try:
        for package in _PACKAGES:
            try:
                return importlib.import_module(f"{package}._api")
            except ModuleNotFoundError as error:
                if error.name not in (package, f"{package}._api"):
                    raise
                missing.append(package)
    finally:
        # NIXL's import turns this off for the process.
        logging.raiseExceptions = raising
    raise ImportError(f"none of {', '.join(missing)} is installed")
