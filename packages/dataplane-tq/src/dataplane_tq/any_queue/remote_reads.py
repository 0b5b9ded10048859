"""Functions that read the state of TransferQueue's actors, inside the actors' processes.

Ray sends the functions by value, so that they run where this package is not installed. They run in
the actor's main thread; another thread answers the job's requests at the same time. A copy of a
built-in container is atomic and a loop over it is not, so containers are copied first.
"""

from __future__ import annotations

import os
import sys
import time
import zlib
from types import FrameType
from typing import Any  # Any: TransferQueue's live objects

import numpy as np
import ray


def read_controller(controller: Any, checksums: dict[str, int]) -> dict[str, Any]:
    """Read all partitions of a controller.

    Args:
        controller: TransferQueue's controller.
        checksums: partition to the checksum that the caller got from its last read.

    Returns:
        ``sampler`` (module of the controller's sampler), ``busy_s`` (duration of this call),
        ``answers`` (whether the thread that answers the job's requests runs), ``blocked_claims``
        (see `_blocked_claims`) and ``partitions`` (see `_partition`).
    """
    began = time.perf_counter()
    partitions = {
        _text(name): _partition(status, checksums.get(name))
        for name, status in list(controller.partitions.items())
    }
    thread = getattr(controller, "process_request_thread", None)
    return {
        "sampler": type(controller.sampler).__module__,
        "answers": thread is None or thread.is_alive(),
        "blocked_claims": _blocked_claims(controller),
        "partitions": partitions,
        "busy_s": time.perf_counter() - began,
    }


def _partition(status: Any, last_checksum: int | None) -> dict[str, Any]:
    """Return ``fields``, ``tasks``, ``expected`` and ``checksum`` of a partition.

    If the checksum differs from ``last_checksum``, also return ``rows`` (int64, index of each
    sample), ``keys`` (int64, hash of each sample's key), and as packed bits ``written`` (samples x
    fields) and ``acknowledged`` (samples x tasks).
    """
    # Keyed by text, so that names and columns agree: names with the same text share one column.
    metadata = _by_text(status.field_metadata)
    columns = _by_text(status.field_name_mapping)
    # A clear resets flags, then removes indexes, and much later keys. Flags are read before
    # indexes, so that a sample seldom looks unclaimed in the middle of a clear.
    consumption = {
        task: column.numpy().copy() for task, column in _by_text(status.consumption_status).items()
    }
    production = status.production_status.numpy().copy()
    keyed = dict(status.keys_mapping)
    held = status.global_indexes.copy()
    indexes = np.fromiter(held, dtype=np.int64, count=len(held))
    fields = [name for name, place in columns.items() if place < production.shape[1]]
    # Samples in the order of their keys' first puts, then those without a key.
    rows = np.fromiter(keyed.values(), dtype=np.int64, count=len(keyed))
    keys = np.fromiter(map(hash, keyed), dtype=np.int64, count=len(keyed))
    present = np.isin(rows, indexes)
    others = np.setdiff1d(indexes, rows)
    rows = np.concatenate([rows[present], others])
    keys = np.concatenate([keys[present], np.zeros(len(others), dtype=np.int64)])
    written = _flags([production[:, columns[name]] for name in fields], rows)
    acknowledged = _flags(list(consumption.values()), rows)
    parts = {
        "rows": rows.tobytes(),
        "keys": keys.tobytes(),
        "written": np.packbits(written).tobytes(),
        "acknowledged": np.packbits(acknowledged).tobytes(),
    }
    # The names are included, because a new task of a small partition may not change the bytes: its
    # flags, all 0, can fit into the padding of the last byte.
    checksum = zlib.crc32(repr((fields, list(consumption))).encode())
    for part in parts.values():
        checksum = zlib.crc32(part, checksum)
    return {
        "fields": {
            name: _field(metadata.get(name), int(count))
            for name, count in zip(fields, written.sum(axis=0), strict=True)
        },
        "tasks": list(consumption),
        "expected": len(rows) + len(getattr(status, "pre_allocated_global_indexes", ())),
        "checksum": checksum,
        **({} if checksum == last_checksum else parts),
    }


def _flags(columns: list[Any], rows: Any) -> Any:
    """Return flags (rows, columns): True where the column is 1, False past a column's end."""
    flags = np.zeros((len(rows), len(columns)), dtype=np.bool_)
    for place, column in enumerate(columns):
        inside = rows < len(column)
        flags[inside, place] = column[rows[inside]] == 1
    return flags


def _field(meta: Any, count: int) -> list[Any]:
    """Return a field's type, how many samples have it, and the bytes of their values, if known."""
    if meta is None:
        return [None, count, None]
    # The request thread may reset them: read each once.
    dtype, shape = meta.dtype, meta.shape
    if meta.is_non_tensor or dtype is None:
        return ["object", count, None]
    size = getattr(dtype, "itemsize", None)
    if meta.is_nested or shape is None or size is None:
        return [str(dtype), count, None]
    for length in tuple(shape):
        size *= int(length)
    return [str(dtype), count, size * count]


def _blocked_claims(controller: Any) -> list[dict[str, Any]]:
    """Return the claims that are blocked in the controller's request thread.

    With ``polling_mode: false``, TransferQueue's default, a claim that finds too few samples waits
    there, and no other request is answered. Only the thread's stack shows which fields it requires.
    """
    claims = []
    for frame in sys._current_frames().values():
        caller: FrameType | None = frame
        while caller is not None and caller.f_code.co_name != "get_metadata":
            caller = caller.f_back
        names = {} if caller is None else caller.f_locals
        if names.get("self") is controller and "start_time" in names:
            claims.append(
                {
                    "partition": _text(names.get("partition_id")),
                    "task": _text(names.get("task_name")),
                    "fields": [_text(name) for name in names.get("data_fields") or ()],
                }
            )
    return claims


def read_samples(
    controller: Any, partition_id: str, rows: list[int], tag: str | None = None, value: Any = None
) -> list[Any]:
    """Return index, hash of the key, key, and tags of the samples with these indexes.

    With ``tag``, return only those whose tag of this name equals ``value``. The hash is 0 and the
    key None for a sample without a key. A tag that is no primitive is replaced by the name of its
    type. Without such a partition, the answer is empty.
    """
    status = _status(controller, partition_id)
    if status is None:
        return []
    samples = []
    for row in rows:
        held = status.custom_meta.get(row)
        if tag is not None and _tags(held, only=tag) != {tag: value}:
            continue
        key = status.revert_keys_mapping.get(row)
        identity = [0, None] if key is None else [hash(key), _text(key)]
        samples.append([row, *identity, _tags(held)])
    return samples


def _status(controller: Any, partition_id: str) -> Any:
    """Return the partition whose name as text is ``partition_id``; None if there is none."""
    partitions = list(controller.partitions.items())
    return next((status for name, status in partitions if _text(name) == partition_id), None)


def _by_text(named: dict[Any, Any]) -> dict[str, Any]:
    return {_text(name): value for name, value in dict(named).items()}


def _tags(held: Any, only: str | None = None) -> dict[str, Any]:
    # The instrumentor stores the origins as a tag; its clients hide it.
    return {
        text: _tag(value)
        for name, value in (dict(held) if isinstance(held, dict) else {}).items()
        if (text := _text(name)) != "dataplane.origins" and only in (None, text)
    }


def _tag(value: Any) -> Any:
    if type(value) is str:
        return _text(value)
    if type(value) is int and not -(2**63) <= value < 2**64:
        return str(value)
    return value if value is None or type(value) in (int, float, bool) else type(value).__name__


def _text(value: Any) -> str:
    """Return ``value`` as text that UTF-8 can hold."""
    return str(value).encode("utf-8", "backslashreplace").decode()


def find_row(controller: Any, partition_id: str, key: str) -> int | None:
    """Return the index of the sample whose key as text is ``key``; None if there is none."""
    status = _status(controller, partition_id)
    if status is None:
        return None
    row = status.keys_mapping.get(key)
    if row is None and "\\" in key:  # the key may contain an escape of `_text`
        keyed = dict(status.keys_mapping)
        row = next((row for name, row in keyed.items() if _text(name) == key), None)
    return row


def read_config(controller: Any) -> dict[str, Any] | None:
    """Return the storage backend and the names of its units; None while the queue starts."""
    config = controller.tq_config
    if config is None:
        return None
    backend = str(config.backend.storage_backend)
    section = config.backend.get(backend)
    units = None if section is None else section.get("zmq_info")
    return {"backend": backend, "units": [] if units is None else [str(name) for name in units]}


def read_unit(unit: Any) -> dict[str, Any]:
    """Return a unit of SimpleStorage: node, samples, their limit, and its process's memory."""
    with open("/proc/self/statm", encoding="ascii") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    limit = unit.storage_unit_size
    return {
        "node": ray.util.get_node_ip_address(),
        "samples": int(unit.storage_data.active_key_count),
        "limit": None if limit is None else int(limit),
        "resident": resident,
    }
