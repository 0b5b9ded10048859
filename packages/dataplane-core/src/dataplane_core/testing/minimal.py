"""`MinimalClient`: a client with the documented methods only."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from dataplane_core.client import DataPlaneClient
from dataplane_core.in_memory import InMemoryDataPlaneClient

_P = ParamSpec("_P")
_T = TypeVar("_T")


def _documented(
    method: Callable[Concatenate[DataPlaneClient, _P], _T],
) -> Callable[Concatenate[MinimalClient, _P], _T]:
    """Return the method without the keyword-only arguments, which the contract does not have."""
    signature = inspect.signature(method)
    parameters = signature.parameters.values()
    documented = signature.replace(
        parameters=[each for each in parameters if each.kind is not each.KEYWORD_ONLY]
    )

    @functools.wraps(method)
    def call(self: MinimalClient, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        documented.bind(self, *args, **kwargs)
        forwarded: Callable[_P, _T] = getattr(self._store, method.__name__)
        return forwarded(*args, **kwargs)

    call.__signature__ = documented  # type: ignore[attr-defined]
    return call


class MinimalClient:
    """Client with the eight documented methods and their documented arguments; no base class.

    For tests of layers that work with any client. Any other method raises AttributeError, any other
    keyword TypeError.

    Args:
        store: the in-memory client that does the work; None creates a new client.
    """

    def __init__(self, store: InMemoryDataPlaneClient | None = None) -> None:
        self._store = InMemoryDataPlaneClient() if store is None else store

    register_partition = _documented(DataPlaneClient.register_partition)
    claim_meta = _documented(DataPlaneClient.claim_meta)
    get_data = _documented(DataPlaneClient.get_data)
    check_consumption_status = _documented(DataPlaneClient.check_consumption_status)
    put_samples = _documented(DataPlaneClient.put_samples)
    get_samples = _documented(DataPlaneClient.get_samples)
    clear_samples = _documented(DataPlaneClient.clear_samples)
    close = _documented(DataPlaneClient.close)
