"""Mooncake's store over TCP: a master that knows where rows are, and actors that hold them.

Clients lend no memory of their own. In Mooncake's usual way each of them lends a segment to all,
and the rows that happened to be placed there are lost when that process ends.
"""

from __future__ import annotations

import ctypes
import os
import shutil
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any  # Any: the store has no static types

import ray

from dataplane_core import ConfigError, DataPlaneConfig, UnavailableError
from dataplane_core.config import require_keys
from dataplane_tq.storage.base import StorageBackend, answers, require_bytes, require_module
from dataplane_tq.storage.daemon import DaemonActor, end_daemon, free_port, listens

_MASTER = "MooncakeMaster"
_LIBRARY = "libibverbs.so.1"
_MEBIBYTE = 1 << 20
_SMALLEST_SEGMENT = 16 * _MEBIBYTE
# A segment serves others and sends nothing by itself.
_SEGMENT_BUFFER = 16 * _MEBIBYTE


class Mooncake(StorageBackend):
    """One master and ``num_storage_units`` segments of ``global_segment_size`` bytes each."""

    manager = "MooncakeStore"
    survivable = False
    # A row without elements is refused, a scalar comes back with one dimension, and bytes put under
    # another dtype are read as the first.
    rows_as_bytes = True

    @classmethod
    def check(cls, cfg: DataPlaneConfig) -> None:
        require_keys(cfg, ["num_storage_units"], impl=cfg["impl"])
        backend = "mooncake_cpu"
        require_bytes(cfg, "global_segment_size", backend=backend, at_least=_SMALLEST_SEGMENT)
        require_bytes(cfg, "local_buffer_size", backend=backend, at_least=_MEBIBYTE)
        require_module("mooncake", backend=backend, extra="mooncake")
        try:
            ctypes.CDLL(_LIBRARY)
        except OSError as error:
            raise ConfigError(
                f"data-plane config: backend {backend!r} needs the system library {_LIBRARY} "
                f"({error}); on Debian: apt-get install libibverbs1"
            ) from None

    def start(
        self, cfg: DataPlaneConfig, *, namespace: str, actor_cpus: float, timeout_s: float
    ) -> None:
        what = "backend 'mooncake_cpu'"
        options = {"namespace": namespace, "num_cpus": actor_cpus}
        master = ray.remote(MooncakeMaster).options(name=_MASTER, **options).remote()
        self.actors[_MASTER] = master
        segments = {}
        for rank in range(cfg["num_storage_units"]):
            name = f"MooncakeSegment#{rank}"
            segment = ray.remote(MooncakeSegment).options(
                name=name, scheduling_strategy="SPREAD", **options
            )
            self.actors[name] = segments[name] = segment.remote()
        try:
            started = {_MASTER: master.start.remote(timeout_s)}
            address = answers(what, started, timeout_s=2 * timeout_s)[_MASTER]
            mounted = {
                name: segment.mount.remote(address, cfg["global_segment_size"])
                for name, segment in segments.items()
            }
            answers(what, mounted, timeout_s=timeout_s)
        except UnavailableError:
            self.stop()
            raise
        self.connection = {
            "client_name": "MooncakeStoreClient",
            "master_server_address": address,
            "metadata_server": "P2PHANDSHAKE",
            "local_hostname": "",  # each process takes its own Ray node's address
            "protocol": "tcp",
            "device_name": "",
            "global_segment_size": 0,
            "local_buffer_size": cfg["local_buffer_size"],
            "hard_pin": True,
            "use_gdr": False,
        }

    def stop(self) -> None:
        if _MASTER in self.actors:
            end_daemon(self.actors[_MASTER])
        super().stop()


class MooncakeMaster(DaemonActor):
    """Runs ``mooncake_master``, which knows every key and every segment."""

    def start(self, timeout_s: float) -> str:
        """Start it on this node.

        Returns:
            Its address, host:port.
        """
        host = ray.util.get_node_ip_address()
        port = free_port(host)
        self.run(
            [
                str(self._executable()),
                f"--rpc_address={host}",
                f"--rpc_port={port}",
                f"--metrics_host={host}",
                f"--metrics_port={free_port(host)}",
                "--enable_metric_reporting=false",
                # As TransferQueue starts it: rows stay until they are cleared.
                "--client_ttl=30",
                "--default_kv_lease_ttl=999999",
                "--default_kv_soft_pin_ttl=999999",
                "--allow_evict_soft_pinned_objects=false",
                "--eviction_high_watermark_ratio=1.0",
                "--eviction_ratio=0.0",
            ],
            ready=lambda: listens(host, port),
            timeout_s=timeout_s,
        )
        return f"{host}:{port}"

    def _executable(self) -> Path:
        """The program in the wheel, which some installers leave without its run bit."""
        spec = find_spec("mooncake")
        assert spec is not None
        assert spec.submodule_search_locations is not None
        shipped = Path(spec.submodule_search_locations[0]) / "mooncake_master"
        if os.access(shipped, os.X_OK):
            return shipped
        private = Path(shutil.copy(shipped, self.folder))
        private.chmod(0o700)
        return private


class MooncakeSegment:
    """Lends memory to the store and serves what is placed there, until its process ends."""

    def __init__(self) -> None:
        self._store: Any = None

    def mount(self, master: str, size: int) -> None:
        """Join the store.

        Args:
            master: address of the master, host:port.
            size: bytes to lend.

        Raises:
            UnavailableError: the store refused.
        """
        host = ray.util.get_node_ip_address()
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # read when the module loads
        self._store = import_module("mooncake.store").MooncakeDistributedStore()
        code = self._store.setup(host, "P2PHANDSHAKE", size, _SEGMENT_BUFFER, "tcp", "", master)
        if code != 0:
            raise UnavailableError(
                f"Mooncake on {host} could not lend {size} bytes to the store of the master at "
                f"{master}: error code {code}"
            )
