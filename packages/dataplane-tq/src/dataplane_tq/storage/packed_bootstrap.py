"""Bootstrap of the packed backend by ``transfer_queue.init`` itself.

verl imports this module by the entry point ``verl.plugins``. TransferQueue itself loads no plugins,
so without verl, import it in the process that makes the first call of ``transfer_queue.init``,
before that call; other processes need no import. Pass a configuration such as::

    backend:
      storage_backend: PackedStorage
      PackedStorage:
        num_storage_units: 2
        global_segment_size: 268435456  # bytes of each unit
        storage_capacity: 1000000  # rows in all partitions; this is the default
        allow_pickle: false  # the default

`PackedStorageSettings` has all keys. The actors live until the process that started them calls
``transfer_queue.close`` or exits.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal  # Any: Ray handles and OmegaConf nodes have no types

import ray
from omegaconf import OmegaConf, open_dict
from pydantic import NonNegativeFloat, PositiveInt

from dataplane_core import ConfigError, validate_config
from dataplane_core.errors import listed
from dataplane_tq.directory.actor import DirectoryActor
from dataplane_tq.storage.base import ACTOR_CPUS, collect_results
from dataplane_tq.storage.packed import Packed
from dataplane_tq.storage.packed_manager import BACKEND, RAW, RawConnection
from dataplane_tq.upstream import StorageBootstrapProvider, interface

_DIRECTORY = "DataPlanePackedDirectory"


@dataclass(frozen=True, kw_only=True)
class PackedStorageSettings:
    """Section ``PackedStorage`` of TransferQueue's configuration.

    Attributes:
        num_storage_units: number of units, spread over the nodes; one per node is enough.
        global_segment_size: bytes of each unit.
        storage_capacity: maximum samples in all partitions.
        ack_timeout_ms: deadline of one store operation, in milliseconds.
        unit_resources: custom Ray resource to the amount that each unit reserves, so that units run
            on the nodes that have it. Without it units are spread over all nodes.
        packed_transport: how clients reach the units: ``shm``, ``tcp``, or ``auto``, which is
            ``shm`` on the unit's own node and ``tcp`` elsewhere.
        allow_pickle: accept any Python value that can be pickled. Whoever can put values can then
            run code in every process that gets them.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}  # for a JSON schema

    num_storage_units: PositiveInt
    global_segment_size: PositiveInt
    storage_capacity: PositiveInt = 1_000_000
    ack_timeout_ms: PositiveInt = 30_000
    unit_resources: dict[str, NonNegativeFloat] = field(default_factory=dict)
    packed_transport: Literal["auto", "shm", "tcp"] = "auto"
    allow_pickle: bool = False


class _WithoutCloseWarning(logging.Filter):
    """Filter of TransferQueue's warning that it cannot close this backend.

    At that moment TransferQueue drops its handles of the actors, so Ray ends the actors anyway.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        return f"close for _TQ_STORAGE with key {BACKEND}" not in record.getMessage()


logging.getLogger("transfer_queue.interface").addFilter(_WithoutCloseWarning())


@contextmanager
def _close_queue_on_error() -> Iterator[None]:
    try:
        yield
    except BaseException:
        # `init` has started the controller, and has set this to {} just before it called `start`.
        # The next `init` would attach to that controller and wait forever for its configuration.
        if interface._TQ_STORAGE == {}:
            interface.close()
        raise


@StorageBootstrapProvider.register_provider(BACKEND)
@_close_queue_on_error()
def start(conf: Any) -> dict[str, Any]:
    """Start the units and their directory, and add their addresses to ``conf``.

    Args:
        conf: TransferQueue's configuration.

    Returns:
        Name to Ray handle of every actor; an actor ends when its handle is dropped.

    Raises:
        ConfigError: (a ValueError) a key of the section is unknown, missing or wrong.
        UnavailableError: the actors did not start in time; all were stopped.
        Exception: after any error, TransferQueue is closed, so that its next ``init`` starts anew.
    """
    section = OmegaConf.to_container(conf.backend.get(BACKEND) or OmegaConf.create({}))
    keys = [each.name for each in fields(PackedStorageSettings)]
    unknown = sorted(map(str, section.keys() - {*keys}))
    if unknown:
        raise ConfigError(
            f"{BACKEND}: found the keys {listed(unknown)}; expected keys of {', '.join(keys)}"
        )
    allow_pickle = section.pop("allow_pickle", PackedStorageSettings.allow_pickle)
    if not isinstance(allow_pickle, bool):
        raise ConfigError(f"{BACKEND}.allow_pickle: found {allow_pickle!r}; expected true or false")
    cfg = validate_config(
        {
            "enabled": True,
            "impl": "transfer_queue",
            "backend": "packed",
            "storage_capacity": PackedStorageSettings.storage_capacity,
            "ack_timeout_ms": PackedStorageSettings.ack_timeout_ms,
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
            cfg["ack_timeout_ms"] / 1000,
            allow_pickle,
        )
    return dict(storage.actors)
