"""Bootstrap of the packed backend by ``transfer_queue.init`` itself.

In the process that makes the first call of ``transfer_queue.init``, import this module before it,
and pass a configuration such as::

    backend:
      storage_backend: PackedStorage
      PackedStorage:
        num_storage_units: 2
        global_segment_size: 268435456  # bytes of each unit
        storage_capacity: 100000  # rows in all partitions

``packed_transport`` and ``ack_timeout_ms`` are optional, as in `dataplane_core.DataPlaneConfig`.
The actors live until that process calls ``transfer_queue.close`` or exits.
"""

from __future__ import annotations

import secrets
from typing import Any  # Any: Ray handles and OmegaConf nodes have no static types

import ray
from omegaconf import OmegaConf

from dataplane_core import DataPlaneError, validate_config
from dataplane_core.config import require_keys
from dataplane_tq.directory.actor import DirectoryActor
from dataplane_tq.storage.base import answers
from dataplane_tq.storage.packed import Packed
from dataplane_tq.storage.packed_manager import BACKEND, RAW, RawConnection
from dataplane_tq.upstream import StorageBootstrapProvider

_START_TIMEOUT_S = 120.0
# The actors are mostly idle; one CPU for each would leave none to a small machine's workers.
_ACTOR_CPUS = 0.1
_DIRECTORY = "DataPlanePackedDirectory"
_DEFAULT_TIMEOUT_MS = 30_000


@StorageBootstrapProvider.register_provider(BACKEND)
def start(conf: Any) -> dict[str, Any]:
    """Start the units and their directory, and add their addresses to ``conf``.

    Args:
        conf: TransferQueue's configuration.

    Returns:
        Name to Ray handle of every actor; an actor ends when its handle is dropped.

    Raises:
        ConfigError: (a ValueError) a key of the section is unknown, missing or wrong.
        UnavailableError: the actors did not start in time; all were stopped.
    """
    section = conf.backend[BACKEND]
    cfg = validate_config(
        {
            "enabled": True,
            "impl": "transfer_queue",
            "backend": "packed",
            **OmegaConf.to_container(section),
        }
    )
    require_keys(cfg, ["storage_capacity"], impl=BACKEND)
    Packed.check(cfg)
    # A queue that was closed just before may still hold its actors' names.
    namespace = f"{BACKEND}-{secrets.token_hex(4)}"
    storage = Packed()
    storage.start(cfg, namespace=namespace, actor_cpus=_ACTOR_CPUS, timeout_s=_START_TIMEOUT_S)
    units = dict(storage.actors)
    directory = (
        ray.remote(DirectoryActor)
        .options(name=_DIRECTORY, namespace=namespace, num_cpus=_ACTOR_CPUS)
        .remote(cfg["storage_capacity"], storage.units, mirrored=False)
    )
    try:
        results = answers(
            f"backend {BACKEND!r}",
            {
                _DIRECTORY: directory.address.remote(),
                "watch": directory.publish.remote([], *storage.watched),
            },
            timeout_s=_START_TIMEOUT_S,
        )
    except DataPlaneError:
        ray.kill(directory)
        storage.stop()
        raise
    section[RAW] = RawConnection(
        results[_DIRECTORY],
        storage.connection["units"],
        storage.connection["token"],
        storage.connection["transport"],
        cfg.get("ack_timeout_ms", _DEFAULT_TIMEOUT_MS) / 1000,
    )
    return {**units, _DIRECTORY: directory}
