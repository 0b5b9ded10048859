"""Mooncake's store over TCP: a master that knows where rows are, and actors that hold them.

Clients contribute no memory. In Mooncake's default setup each client contributes a segment, and the
rows in it are lost when that process exits.
"""

from __future__ import annotations

import ctypes
import os
import shutil
from http.client import HTTPConnection, HTTPException
from importlib import import_module
from ipaddress import ip_address
from math import ceil
from pathlib import Path
from typing import Any  # Any: the store has no static types

import ray
import structlog

from dataplane_core import (
    ConfigError,
    DataPlaneConfig,
    DeadlineExceededError,
    UnavailableError,
)
from dataplane_core.config import require_keys
from dataplane_tq.storage.base import (
    ACTOR_CPUS,
    START_S,
    StorageBackend,
    collect_results,
    require_bytes,
    require_module,
)
from dataplane_tq.storage.daemon import DaemonActor, end_daemon, free_port, listens, package_folder

logger = structlog.get_logger("dataplane_tq.storage")

_MASTER = "MooncakeMaster"
_LIBRARY = "libibverbs.so.1"
_MEBIBYTE = 1 << 20
_MIN_SEGMENT_BYTES = 16 * _MEBIBYTE
# Small, because a segment only answers requests.
_SEGMENT_BUFFER_BYTES = 16 * _MEBIBYTE


class Mooncake(StorageBackend):
    """Backend of one master and ``num_storage_units`` segments of ``global_segment_size`` bytes."""

    manager = "MooncakeStore"
    survivable = False
    # Mooncake refuses a row without elements, returns a scalar with one dimension, and reads a row
    # that was overwritten with another dtype as the first dtype.
    rows_as_bytes = True

    @classmethod
    def check(cls, cfg: DataPlaneConfig) -> None:
        require_keys(cfg, ["num_storage_units"], impl=cfg["impl"])
        backend = "mooncake_cpu"
        require_bytes(cfg, "global_segment_size", backend=backend, min_bytes=_MIN_SEGMENT_BYTES)
        require_bytes(cfg, "local_buffer_size", backend=backend, min_bytes=_MEBIBYTE)
        require_module("mooncake", backend=backend, extra="mooncake", pythons="3.11 to 3.13")
        try:
            ctypes.CDLL(_LIBRARY)
        except OSError as error:
            raise ConfigError(
                f"data-plane config: backend {backend!r} needs the system library {_LIBRARY} "
                f"({error}); on Debian: apt-get install libibverbs1"
            ) from None

    def start(self, cfg: DataPlaneConfig, namespace: str) -> None:
        if ip_address(ray.util.get_node_ip_address()).is_loopback:
            logger.warning(
                "mooncake_listens_on_all_interfaces",
                hint="its library cannot be restricted to loopback; close its ports by firewall, "
                "or use another backend",
            )
        what = "backend 'mooncake_cpu'"
        options = {"namespace": namespace, "num_cpus": ACTOR_CPUS}
        master = ray.remote(MooncakeMaster).options(name=_MASTER, **options).remote()
        self.actors[_MASTER] = master
        segments = {}
        for rank in range(cfg["num_storage_units"]):
            name = f"MooncakeSegment#{rank}"
            segment = ray.remote(MooncakeSegment).options(
                name=name, scheduling_strategy="SPREAD", **options
            )
            self.actors[name] = segments[name] = segment.remote()
        started = {_MASTER: master.start.remote()}
        address, health = collect_results(what, started, timeout_s=2 * START_S)[_MASTER]
        mounted = {
            name: segment.mount.remote(address, cfg["global_segment_size"])
            for name, segment in segments.items()
        }
        collect_results(what, mounted)
        self.connection = {
            "client_name": "MooncakeStoreClient",
            "master_server_address": address,
            "master_health_address": health,  # for `bounded`
            "metadata_server": "P2PHANDSHAKE",
            "local_hostname": "",  # each process takes its own Ray node's address
            "protocol": "tcp",
            "device_name": "",
            "global_segment_size": 0,
            "local_buffer_size": cfg["local_buffer_size"],
            "hard_pin": True,
            "use_gdr": False,
        }

    @classmethod
    def bounded(cls, connection: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        # The library holds the GIL while it connects: a master that does not answer would block
        # every thread of this process.
        address = connection["master_health_address"]
        probe = HTTPConnection(address, timeout=timeout_s)
        try:
            probe.request("GET", "/health")
            probe.getresponse()
        except TimeoutError:
            raise DeadlineExceededError(
                f"connect: no answer from Mooncake's master at {address} after {timeout_s:g} s"
            ) from None
        except (OSError, HTTPException) as error:
            raise UnavailableError(
                f"connect: Mooncake's master at {address} is gone: {error}"
            ) from error
        finally:
            probe.close()
        _bound_calls(timeout_s)
        return connection

    def stop(self) -> None:
        if _MASTER in self.actors:
            end_daemon(self.actors[_MASTER])
        super().stop()


def _bound_calls(timeout_s: float) -> None:
    """Set the library's deadlines in the environment, unless set already.

    The library reads them when it loads and when it connects; its defaults are 30 s and more.
    """
    milliseconds, seconds = str(ceil(timeout_s * 1000)), str(ceil(timeout_s))
    for name, value in {
        "MC_LOG_LEVEL": "ERROR",
        "MC_RPC_CONNECT_TIMEOUT_MS": milliseconds,
        "MC_RPC_TIMEOUT_MS": milliseconds,
        "MC_HANDSHAKE_CONNECT_TIMEOUT": seconds,
        "MC_TCP_PROGRESS_TIMEOUT_SEC": seconds,
        # The library retries when a random port is in use; each attempt may take the full time.
        "MC_STORE_CLIENT_SETUP_RETRIES": "3",
    }.items():
        os.environ.setdefault(name, value)


class MooncakeMaster(DaemonActor):
    """Actor that runs ``mooncake_master``, which knows every key and every segment."""

    def start(self) -> tuple[str, str]:
        """Start the master on this node.

        Returns:
            The address of the master, and of its page ``/health``; both as host:port.
        """
        host = ray.util.get_node_ip_address()
        port, health_port = free_port(host), free_port(host)
        self.run(
            [
                str(self._executable()),
                f"--rpc_address={host}",
                f"--rpc_port={port}",
                f"--metrics_host={host}",
                f"--metrics_port={health_port}",
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
            timeout_s=START_S,
        )
        return f"{host}:{port}", f"{host}:{health_port}"

    def _executable(self) -> Path:
        """Return the program in the wheel; some installers drop its executable bit."""
        shipped = package_folder("mooncake") / "mooncake_master"
        if os.access(shipped, os.X_OK):
            return shipped
        private = Path(shutil.copy(shipped, self.folder))
        private.chmod(0o700)
        return private


class MooncakeSegment:
    """Actor that contributes memory to the store and serves the rows in it."""

    def __init__(self) -> None:
        self._store: Any = None

    def mount(self, master: str, size: int) -> None:
        """Join the store.

        Args:
            master: address of the master, host:port.
            size: memory to contribute, in bytes.

        Raises:
            UnavailableError: the store refused.
        """
        host = ray.util.get_node_ip_address()
        _bound_calls(START_S)
        self._store = import_module("mooncake.store").MooncakeDistributedStore()
        code = self._store.setup(
            host, "P2PHANDSHAKE", size, _SEGMENT_BUFFER_BYTES, "tcp", "", master
        )
        if code != 0:
            raise UnavailableError(
                f"Mooncake on {host} could not mount a segment of {size} bytes at the master "
                f"{master}: error code {code}"
            )
