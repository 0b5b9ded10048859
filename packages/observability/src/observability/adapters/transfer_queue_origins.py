"""Origins of TransferQueue's samples: which put wrote which field.

They are stored as one tag of a sample, so that every process of a job can read them. The program
must not see this tag. But TransferQueue replaces all tags of a sample at once, so each change of
tags has to send the origins again. Therefore a meta that the program gets has them in its backend
metadata: TransferQueue's copies and selections of a meta keep names there that begin with "_".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from copy import copy
from functools import cache, wraps
from typing import Any  # Any: TransferQueue has no types

from observability.adapters.transfer_queue_keys import store as store_keys
from observability.middleware.origin import Origin

_TAG = "dataplane.origins"
"""Tag with the fields by origin, as JSON: TransferQueue copies a text faster than nested lists."""
_HIDDEN = "_dataplane.origins"
"""Name of the same text in a sample's backend metadata."""


def add(meta: Any, fields: Iterable[str]) -> None:
    """Make the current span, if it is sampled, the only origin of the fields that a put writes."""
    origin, written = Origin.current(), set(fields)
    new = {} if origin is None else {str(origin): sorted(written)}

    @cache  # many samples have equal origins
    def replaced(text: str) -> str:
        others = {key: sorted({*names} - written) for key, names in json.loads(text).items()}
        return json.dumps({key: names for key, names in others.items() if names} | new)

    for backend in meta._custom_backend_meta:
        if new or _HIDDEN in backend:
            backend[_HIDDEN] = replaced(backend.get(_HIDDEN, "{}"))


def of(meta: Any) -> list[str]:
    """Return each origin of the meta's samples and fields once."""
    texts = dict.fromkeys(backend.get(_HIDDEN, "{}") for backend in meta._custom_backend_meta)
    writers = [pair for text in texts for pair in json.loads(text).items()]
    fields = meta.field_schema.keys()
    return list(dict.fromkeys(key for key, names in writers if not fields.isdisjoint(names)))


def hide(meta: Any) -> Any:
    """Move the origins of a meta from its tags to its backend metadata, and return the meta."""
    for tags, backend in zip(meta.custom_meta, meta._custom_backend_meta, strict=True):
        if _TAG in tags:
            backend[_HIDDEN] = tags.pop(_TAG)
    return meta


def wrap_retrieval(method: Callable[..., Any]) -> Callable[..., Any]:
    """Hide the origins of the meta that a method returns, and store its keys there."""

    @wraps(method)
    async def retrieval_without_origins(
        client: Any, keys: list[str] | str, *args: Any, **kwargs: Any
    ) -> Any:
        meta = hide(await method(client, keys, *args, **kwargs))
        store_keys(meta, [keys] if isinstance(keys, str) else keys)
        return meta

    return retrieval_without_origins


def wrap_tagging(method: Callable[..., Any]) -> Callable[..., Any]:
    """Add the hidden origins of a meta to the tags that a method stores."""

    @wraps(method)
    async def tagging_with_origins(client: Any, metadata: Any, *args: Any, **kwargs: Any) -> Any:
        stored = copy(metadata)
        stored.custom_meta = [
            {**tags, _TAG: backend[_HIDDEN]} if _HIDDEN in backend else tags
            for tags, backend in zip(
                metadata.custom_meta, metadata._custom_backend_meta, strict=True
            )
        ]
        return await method(client, stored, *args, **kwargs)

    return tagging_with_origins


def wrap_listing(method: Callable[..., Any]) -> Callable[..., Any]:
    """Remove the origins from the tags of the samples that a method returns."""

    @wraps(method)
    async def listing_without_origins(*args: Any, **kwargs: Any) -> Any:
        partitions = await method(*args, **kwargs)
        for samples in partitions.values():
            for tags in samples.values():
                tags.pop(_TAG, None)
        return partitions

    return listing_without_origins
