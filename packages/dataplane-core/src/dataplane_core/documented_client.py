"""Any client with the documented methods, as a `DataPlaneClient`.

The documented ones are ``register_partition``, ``claim_meta``, ``get_data``,
``check_consumption_status``, ``put_samples``, ``get_samples``, ``clear_samples`` and ``close``.
Layers above clients take whatever has them: what goes beyond is used where a client has it, and is
made of these as `DataPlaneClient` makes it where it does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any  # Any: a client of another package

from dataplane_core.arguments import refused
from dataplane_core.client import Capabilities, DataPlaneClient

if TYPE_CHECKING:
    from collections.abc import Hashable

_METHODS = tuple(
    name
    for name in dir(DataPlaneClient)
    if callable(getattr(DataPlaneClient, name)) and name[0] != "_"
)


def as_client(client: Any) -> DataPlaneClient:
    """``client`` itself if it derives from `DataPlaneClient`, else one that passes calls on to it.

    Args:
        client: has the documented methods, with the documented arguments.

    Raises:
        InvalidTypeError: (a ValueError and a TypeError) it lacks one of them; names it.
    """
    if isinstance(client, DataPlaneClient):
        return client
    for name in sorted(DataPlaneClient.__abstractmethods__):
        if not callable(getattr(client, name, None)):
            raise refused("data-plane client", "it", client, f"an object with the method {name!r}")
    return _Documented(client)  # type: ignore[abstract]  # see below the class


class _Documented(DataPlaneClient):
    """A client with the documented methods, and what `DataPlaneClient` makes of these."""

    def __init__(self, client: Any) -> None:
        self._client = client
        own = getattr(client, "capabilities", None)
        if isinstance(own, Capabilities):
            self.capabilities = own  # type: ignore[misc]  # each client says its own
        for name in _METHODS:
            method = getattr(client, name, None)
            if callable(method):
                setattr(self, name, method)

    @property
    def store_key(self) -> Hashable:
        """See `DataPlaneClient.store_key`."""
        key: Hashable = getattr(self._client, "store_key", self._client)
        return key


_Documented.__abstractmethods__ = frozenset()  # `as_client` saw to it that each is there
