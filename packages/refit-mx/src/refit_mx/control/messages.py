"""ModelExpress's protobuf modules, without the packages around them.

Importing ``modelexpress`` or ``modelexpress_rl`` imports torch, CUDA's bindings and NIXL, none of
which a control plane needs, and NIXL's libraries end a process that has loaded another gRPC with
them. The modules of messages and services stand alone, so they are imported with their packages
standing in as bare names, which are taken away again: who imports the real packages later gets
them, with these very modules.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder
from types import ModuleType
from typing import TYPE_CHECKING

__all__ = ["compute_mx_source_id", "p2p_pb2", "p2p_pb2_grpc", "refit_pb2", "refit_pb2_grpc"]

_lock = threading.Lock()


@contextmanager
def _bare(*packages: str) -> Iterator[None]:
    """Let submodules of packages be imported without running the packages' own code."""
    stood_in = []
    with _lock:
        try:
            for name in packages:
                if name in sys.modules:
                    continue
                top, _, rest = name.partition(".")
                spec = PathFinder.find_spec(top)
                if spec is None or not spec.submodule_search_locations:
                    raise ModuleNotFoundError(f"No module named {top!r}", name=top)
                module = ModuleType(name)
                module.__path__ = [
                    "/".join([folder, *rest.split(".")]) if rest else folder
                    for folder in spec.submodule_search_locations
                ]
                sys.modules[name] = module
                stood_in.append(name)
            yield
        finally:
            for name in stood_in:
                sys.modules.pop(name, None)


if TYPE_CHECKING:  # so that they are modules and classes to a checker
    from modelexpress import p2p_pb2, p2p_pb2_grpc
    from modelexpress.metadata.source_id import compute_mx_source_id
    from modelexpress_rl import refit_pb2, refit_pb2_grpc
else:
    with _bare("modelexpress", "modelexpress.metadata", "modelexpress_rl"):
        p2p_pb2 = importlib.import_module("modelexpress.p2p_pb2")
        p2p_pb2_grpc = importlib.import_module("modelexpress.p2p_pb2_grpc")
        compute_mx_source_id = importlib.import_module(
            "modelexpress.metadata.source_id"
        ).compute_mx_source_id
        refit_pb2 = importlib.import_module("modelexpress_rl.refit_pb2")
        refit_pb2_grpc = importlib.import_module("modelexpress_rl.refit_pb2_grpc")
