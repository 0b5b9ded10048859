"""`as_client`: adapts any client with the documented methods to `DataPlaneClient`.

The documented methods are ``register_partition``, ``claim_meta``, ``get_data``,
``check_consumption_status``, ``put_samples``, ``get_samples``, ``clear_samples`` and ``close``.
If the client has other methods of `DataPlaneClient`, they are used too; the base class provides the
rest. The inspector is the client's ``inspector``, else the client itself if it has all methods of a
`StoreInspector`.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any  # Any: a client of another package

from dataplane_core.arguments import argument_type_error
from dataplane_core.capabilities import Capabilities
from dataplane_core.client import DataPlaneClient
from dataplane_core.inspector import StoreInspector

if TYPE_CHECKING:
    from collections.abc import Hashable

_METHODS = tuple(
    name
    for name in dir(DataPlaneClient)
    if callable(getattr(DataPlaneClient, name)) and name[0] != "_"
)


def as_client(client: Any) -> DataPlaneClient:
    """Return ``client`` if it is a `DataPlaneClient`, else a `DataPlaneClient` that wraps it.

    Args:
        client: an object with the documented methods and their documented arguments.

    Raises:
        InvalidTypeError: (a ValueError and a TypeError) ``client`` lacks a method; the error names
            the method.
    """
    if isinstance(client, DataPlaneClient):
        return client
    for name in sorted({*DataPlaneClient.__abstractmethods__, "get_data"}):
        if not callable(getattr(client, name, None)):
            raise argument_type_error(
                "as_client", "client", client, f"an object with the method {name!r}"
            )
    return _DocumentedClient(client)  # type: ignore[abstract]  # its abstract methods are cleared below


def accepts_lengths(client: DataPlaneClient) -> bool:
    """Return whether the client's ``get_columns`` has the argument ``lengths``.

    Overrides may lack it. An override with ``**keywords`` counts as one that lacks it, because it
    may forward them to another override.
    """
    return "lengths" in inspect.signature(client.get_columns).parameters


class _DocumentedClient(DataPlaneClient):
    """Wrapper of a client with the documented methods."""

    def __init__(self, client: Any) -> None:
        self._client = client
        capabilities = getattr(client, "capabilities", None)
        if isinstance(capabilities, Capabilities):
            self.capabilities = capabilities  # type: ignore[misc]  # a class variable in the base
        for name in _METHODS:
            method = getattr(client, name, None)
            if callable(method):
                setattr(self, name, method)

    @property
    def store_key(self) -> Hashable:
        """Key of the wrapped client's store; see `DataPlaneClient.store_key`."""
        key: Hashable = getattr(self._client, "store_key", self._client)
        return key

    @property
    def inspector(self) -> StoreInspector:
        inspector = getattr(self._client, "inspector", self._client)
        return inspector if isinstance(inspector, StoreInspector) else super().inspector


_DocumentedClient.__abstractmethods__ = frozenset()  # `as_client` checked that the client has them
