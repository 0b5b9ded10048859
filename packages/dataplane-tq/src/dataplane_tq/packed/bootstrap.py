"""The packed backend as a plain backend of TransferQueue: ``transfer_queue.init`` starts it.

Import this module before the first ``transfer_queue.init``, in the process that makes it, with a
configuration such as::

    backend:
      storage_backend: PackedStorage
      PackedStorage:
        num_storage_units: 2
        global_segment_size: 268435456  # bytes of each unit
        storage_capacity: 100000  # rows in all partitions

Optional are ``packed_transport`` and ``ack_timeout_ms``, as in `dataplane_core.DataPlaneConfig`.
The actors live until ``transfer_queue.close`` in that process, or its end.
"""

from __future__ import annotations

import secrets
from typing import Any  # Any: Ray handles and OmegaConf nodes have no static types

import ray
from omegaconf import OmegaConf

from dataplane_core import DataPlaneError, validate_config
from dataplane_core.config import require_keys
from dataplane_tq.directory_actor import DirectoryActor
from dataplane_tq.packed.manager import BACKEND, RAW, RawConnection
from dataplane_tq.storage.base import answers
from dataplane_tq.storage.packed import Packed
from dataplane_tq.upstream import StorageBootstrapProvider

_START_TIMEOUT_S = 120.0
# The actors mostly wait; a whole CPU for each would leave none to a small machine's workers.
_ACTOR_CPUS = 0.1
_DIRECTORY = "DataPlanePackedDirectory"
_DEFAULT_TIMEOUT_MS = 30_000


@StorageBootstrapProvider.register_provider(BACKEND)
def start(conf: Any) -> dict[str, Any]:
    """Start the units and their directory, and enter into ``conf`` how to reach them.

    Args:
        conf: TransferQueue's configuration.

    Returns:
        Name to Ray handle of every actor; they end when the handles are dropped.

    Raises:
        ConfigError: (a ValueError) on unknown, missing and wrong keys of the section.
        UnavailableError: the actors did not start in time; none is left.
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
    # Actors of a queue that was closed just before may still hold their names.
    namespace = f"{BACKEND}-{secrets.token_hex(4)}"
    storage = Packed()
    storage.start(cfg, namespace=namespace, actor_cpus=_ACTOR_CPUS, timeout_s=_START_TIMEOUT_S)
    units = dict(storage.actors)
    directory = (
        ray.remote(DirectoryActor)
        .options(name=_DIRECTORY, namespace=namespace, num_cpus=_ACTOR_CPUS)
        .remote(cfg["storage_capacity"], storage.units)
    )
    try:
        found = answers(
            f"backend {BACKEND!r}",
            {
                _DIRECTORY: directory.address.remote(),
                "watch": directory.publish.remote([], *storage.lifelines),
            },
            timeout_s=_START_TIMEOUT_S,
        )
    except DataPlaneError:
        ray.kill(directory)
        storage.stop()
        raise
    section[RAW] = RawConnection(
        found[_DIRECTORY],
        storage.connection["units"],
        storage.connection["token"],
        storage.connection["transport"],
        cfg.get("ack_timeout_ms", _DEFAULT_TIMEOUT_MS) / 1000,
    )
    return {**units, _DIRECTORY: directory}
