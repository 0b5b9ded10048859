"""Yuanrong's data system: a worker process that holds rows in memory shared with its clients.

The worker is started directly, because one started by ``dscli start`` outlives a crashed driver. A
client looks for the worker on its own node, so one worker serves one node.
"""

from __future__ import annotations

import os
from typing import Any  # Any: TransferQueue's options have no static types

import ray

from dataplane_core import ConfigError, DataPlaneConfig
from dataplane_tq.storage.base import (
    ACTOR_CPUS,
    START_S,
    StorageBackend,
    collect_results,
    require_bytes,
    require_module,
)
from dataplane_tq.storage.daemon import DaemonActor, end_daemon, free_port, package_folder
from dataplane_tq.upstream import set_yuanrong_timeout

_WORKER = "YuanrongWorker"
_HOST = "127.0.0.1"
_MEBIBYTE = 1 << 20


class Yuanrong(StorageBackend):
    """Backend of one worker with ``global_segment_size`` bytes, on a Ray cluster of one node."""

    manager = "Yuanrong"
    survivable = False

    @classmethod
    def check(cls, cfg: DataPlaneConfig) -> None:
        backend = "yuanrong"
        require_bytes(cfg, "global_segment_size", backend=backend, min_bytes=64 * _MEBIBYTE)
        require_module("yr.datasystem", backend=backend, extra="yuanrong", pythons="3.11 and 3.12")

    def start(self, cfg: DataPlaneConfig, namespace: str) -> None:
        nodes = [node for node in ray.nodes() if node["Alive"]]
        if len(nodes) != 1:
            raise ConfigError(
                f"backend 'yuanrong': found a Ray cluster of {len(nodes)} nodes; expected 1, "
                "because its worker listens on loopback only"
            )
        worker = (
            ray.remote(YuanrongWorker)
            .options(name=_WORKER, namespace=namespace, num_cpus=ACTOR_CPUS)
            .remote()
        )
        self.actors[_WORKER] = worker
        started = {_WORKER: worker.start.remote(cfg["global_segment_size"])}
        ports = collect_results("backend 'yuanrong'", started, timeout_s=2 * START_S)
        self.connection = {
            "client_name": "YuanrongStorageClient",
            "worker_port": ports[_WORKER],
            "enable_yr_npu_transport": False,
            "ds_max_workers": 1,
        }

    @classmethod
    def bounded(cls, connection: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        set_yuanrong_timeout(timeout_s)
        return connection

    def stop(self) -> None:
        if _WORKER in self.actors:
            end_daemon(self.actors[_WORKER])
        super().stop()


class YuanrongWorker(DaemonActor):
    """Actor that runs ``datasystem_worker`` with an embedded metastore."""

    def start(self, size: int) -> int:
        """Start the worker on loopback.

        Args:
            size: size of the shared memory, in bytes.

        Returns:
            The worker's port.
        """
        package = package_folder("yr.datasystem")
        port = free_port(_HOST)
        ready = self.folder / "ready"
        options = {
            "worker_address": f"{_HOST}:{port}",
            "metastore_address": f"{_HOST}:{free_port(_HOST)}",
            "start_metastore_service": "true",
            "shared_memory_size_mb": size // _MEBIBYTE,
            "arena_per_tenant": 1,
            "ready_check_path": ready,
            "health_check_path": self.folder / "healthy",
            "log_dir": self.folder / "logs",
            "monitor_config_file": self.folder / "datasystem.config",
            "rocksdb_store_dir": self.folder / "rocksdb",
            "rocksdb_write_mode": "none",  # nothing is recovered after an exit
            "unix_domain_socket_dir": self.folder / "sockets",
        }
        libraries = f"{package / 'lib'}:{os.environ.get('LD_LIBRARY_PATH', '')}"
        self.run(
            [
                str(package / "datasystem_worker"),
                *(f"--{name}={value}" for name, value in options.items()),
            ],
            env={"LD_LIBRARY_PATH": libraries},
            ready=ready.exists,
            timeout_s=START_S,
        )
        return port
