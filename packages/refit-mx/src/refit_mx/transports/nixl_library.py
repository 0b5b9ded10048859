"""NIXL as a library that may be missing, and that reads its settings from the environment."""

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

# In the order in which modelexpress looks for them, so that one process loads one of them.
_PACKAGES = ("nixl_cu13", "nixl_cu12", "nixl")
_RDMA = Path("/sys/class/infiniband")
_LOOK_US = 1000
# They carry a gRPC and a protobuf of their own.
_IN_THE_WAY = ("yr.datasystem",)
_making = threading.Lock()


def prepare_environment() -> None:
    """Set what NIXL reads at its import, where the user has not.

    On a machine without RDMA: ``UCX_TLS=tcp,shm,self``, and ``UCX_MODULES=^ib``, without which a
    process crashes at exit where a system libibverbs is present. On one with RDMA neither: they
    would switch it off. Everywhere ``NIXL_LOG_LEVEL=WARN``, since NIXL logs to stdout. Does nothing
    once NIXL is imported.
    """
    if any(f"{package}._api" in sys.modules for package in _PACKAGES):
        return
    if not has_rdma():
        os.environ.setdefault("UCX_TLS", "tcp,shm,self")
        os.environ.setdefault("UCX_MODULES", "^ib")
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")


def has_rdma() -> bool:
    """Whether this machine has a device for RDMA; else UCX lets the processors copy."""
    return _RDMA.is_dir() and any(_RDMA.iterdir())


def nixl_available() -> str | None:
    """None if NIXL can be used, else why not."""
    for other in _IN_THE_WAY:
        if other in sys.modules:
            return f"this process holds {other}, whose libraries and NIXL's end it when they meet"
    if not sys.platform.startswith("linux"):
        return f"NIXL has no build for {sys.platform}"
    try:
        _api()
    except ImportError as error:
        return f"NIXL cannot be imported ({error}); install refit-mx[nixl]"
    return None


def new_agent(prefix: str, *, serves: bool, threads: int = 0) -> Any:  # Any: see the import
    """A UCX agent whose name no other process, and no later one, ever has.

    Args:
        prefix: of its name, for those who read logs.
        serves: whether others read from it, so that it has to work while nobody calls it; else it
            works when it is asked how its transfers stand.
        threads: of the backend's own that carry out large transfers; 0 has none.

    Raises:
        RefitConfigError: NIXL is missing, or has no UCX.
    """
    why = nixl_available()
    if why is not None:
        raise RefitConfigError(why)
    api = _api()
    config = api.nixl_agent_config(enable_prog_thread=serves, num_threads=threads, backends=["UCX"])
    with _patient(api):
        agent = api.nixl_agent(f"{prefix}-{uuid.uuid4().hex}", config)
    if "UCX" not in agent.backends:
        raise RefitConfigError("NIXL's plugin UCX is missing; see NIXL_PLUGIN_DIR")
    return agent


@contextmanager
def _patient(api: Any) -> Iterator[None]:  # Any: see the import
    """Let the thread of an agent that is made meanwhile sleep between looks.

    NIXL's Python API has it look without a pause, which takes a core for as long as the agent lives
    and slows the transfers themselves where cores are few. The setting exists one layer below.
    """
    bindings: Any = getattr(api, "nixlBind", None)  # Any: see the import
    plain = getattr(bindings, "nixlAgentConfig", None)
    if plain is None or not hasattr(plain, "pthrDelay"):
        yield
        return

    def set_attribute(config: Any, name: str, value: object) -> None:
        plain.__setattr__(config, name, _LOOK_US if name == "pthrDelay" else value)

    patient = type("Patient", (plain,), {"__setattr__": set_attribute})
    with _making:
        bindings.nixlAgentConfig = patient
        try:
            yield
        finally:
            bindings.nixlAgentConfig = plain


def is_disconnect(error: BaseException) -> bool:
    """Whether NIXL says that the peer's connection is gone, so that nothing comes from it."""
    return type(error).__name__ == "nixlRemoteDisconnectError"


def is_unreachable(error: BaseException) -> bool:
    """Whether NIXL could not connect to a peer, for all that its metadata says."""
    return is_disconnect(error) or type(error).__name__ == "nixlBackendError"


@cache
def _api() -> Any:  # Any: see the import
    prepare_environment()
    found: list[str] = []
    raising = logging.raiseExceptions
    try:
        for package in _PACKAGES:
            try:
                return importlib.import_module(f"{package}._api")
            except ModuleNotFoundError as error:
                if error.name not in (package, f"{package}._api"):
                    raise
                found.append(package)
    finally:
        # NIXL's import switches this off for the whole process.
        logging.raiseExceptions = raising
    raise ImportError(f"none of {', '.join(found)} is installed")
