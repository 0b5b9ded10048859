"""Bootstrap of the packed backend by ``transfer_queue.init`` itself.

verl imports this module by the entry point ``verl.plugins``. Elsewhere, import it in the process
that makes the first call of ``transfer_queue.init``, before that call; other processes need no
import. Pass a configuration such as::

    backend:
      storage_backend: PackedStorage
      PackedStorage:
        num_storage_units: 2
        global_segment_size: 268435456  # bytes of each unit
        storage_capacity: 1000000  # rows in all partitions; this is the default
        allow_pickle: false  # the default

``packed_transport``, ``unit_resources`` and ``ack_timeout_ms`` are optional, as in
`dataplane_core.DataPlaneConfig`; other keys are refused. With ``allow_pickle`` the store takes any
Python value that pickle takes, and whoever can put values can run code in every process that gets
them. The actors live until the process that started them calls ``transfer_queue.close`` or exits.
"""

from __future__ import annotations

import logging
import secrets
from typing import Any  # Any: Ray handles and OmegaConf nodes have no static types

import ray
from omegaconf import OmegaConf, open_dict

from dataplane_core import ConfigError, validate_config
from dataplane_core.errors import listed
from dataplane_tq.directory.actor import DirectoryActor
from dataplane_tq.storage.base import ACTOR_CPUS, collect_results
from dataplane_tq.storage.packed import Packed
from dataplane_tq.storage.packed_manager import BACKEND, RAW, RawConnection
from dataplane_tq.upstream import StorageBootstrapProvider

_DIRECTORY = "DataPlanePackedDirectory"
_DEFAULT_TIMEOUT_MS = 30_000
_DEFAULT_CAPACITY = 1_000_000
_KEYS = (
    *("num_storage_units", "global_segment_size", "storage_capacity"),
    *("packed_transport", "unit_resources", "ack_timeout_ms"),
)


class _WithoutCloseWarning(logging.Filter):
    """Filter of TransferQueue's warning that it cannot close this backend.

    At that moment TransferQueue drops its handles of the actors, so Ray ends the actors anyway.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        return f"close for _TQ_STORAGE with key {BACKEND}" not in record.getMessage()


logging.getLogger("transfer_queue.interface").addFilter(_WithoutCloseWarning())


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
    section = OmegaConf.to_container(conf.backend.get(BACKEND) or OmegaConf.create({}))
    allow_pickle = section.pop("allow_pickle", False)
    if not isinstance(allow_pickle, bool):
        raise ConfigError(f"{BACKEND}.allow_pickle: found {allow_pickle!r}; expected true or false")
    unknown = sorted(map(str, section.keys() - {*_KEYS}))
    if unknown:
        raise ConfigError(
            f"{BACKEND}: found the keys {listed(unknown)}; expected keys of {', '.join(_KEYS)} and "
            "allow_pickle"
        )
    cfg = validate_config(
        {
            "enabled": True,
            "impl": "transfer_queue",
            "backend": "packed",
            "storage_capacity": _DEFAULT_CAPACITY,
            **section,
        }
    )
    Packed.check(cfg)
    # A queue that was closed just before may still hold its actors' names.
    namespace = f"{BACKEND}-{secrets.token_hex(4)}"
    storage = Packed()
    try:
        storage.start(cfg, namespace)
        directory = (
            ray.remote(DirectoryActor)
            .options(name=_DIRECTORY, namespace=namespace, num_cpus=ACTOR_CPUS)
            .remote(cfg["storage_capacity"], storage.units, mirrored=False)
        )
        storage.actors[_DIRECTORY] = directory
        results = collect_results(
            f"backend {BACKEND!r}",
            {
                _DIRECTORY: directory.address.remote(),
                "watch": directory.publish.remote([], *storage.watched),
            },
        )
    except BaseException:  # an interrupt, too, must leave no actor behind
        storage.stop()
        raise
    with open_dict(conf):  # Hydra's configurations take no new keys otherwise
        conf.backend[BACKEND][RAW] = RawConnection(
            results[_DIRECTORY],
            storage.connection["units"],
            storage.connection["token"],
            storage.connection["transport"],
            cfg.get("ack_timeout_ms", _DEFAULT_TIMEOUT_MS) / 1000,
            allow_pickle,
        )
    return dict(storage.actors)
