"""Builds clients by name. Adapters and middleware are found through entry points.

A distribution adds an ``impl`` by declaring an entry point in the group ``dataplane_core.clients``
(called as ``factory(cfg, bootstrap=...)``), and a middleware by one in
``dataplane_core.middleware`` (called as ``wrap(client, observability_cfg)``); core needs no change
for either.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, cast  # Any: configuration from YAML

from dataplane_core.client import DataPlaneClient
from dataplane_core.config import DataPlaneConfig, validate_config
from dataplane_core.errors import ConfigError

CLIENT_GROUP = "dataplane_core.clients"
MIDDLEWARE_GROUP = "dataplane_core.middleware"


def build_data_plane_client(
    cfg: DataPlaneConfig | Mapping[str, Any] | None, *, bootstrap: bool = True
) -> DataPlaneClient:
    """Build the client that ``cfg["impl"]`` names, wrapped in middleware if that is enabled.

    Args:
        cfg: see `DataPlaneConfig`.
        bootstrap: True on the one process that brings the store up, False to attach to it.

    Raises:
        ConfigError: (a ValueError) if ``cfg`` is None, not enabled, not valid, or names an impl
            that no installed distribution offers.
    """
    valid = validate_config(cfg)
    if not valid["enabled"]:
        raise ConfigError("data-plane config: enabled is false; set it to true to build a client")
    client = _load_client(valid["impl"])(valid, bootstrap=bootstrap)
    observability = valid.get("observability")
    if observability is not None and observability["enabled"]:
        wrappers = sorted(entry_points(group=MIDDLEWARE_GROUP), key=lambda entry: entry.name)
        if not wrappers:
            client.close()
            raise ConfigError(
                "data-plane config: observability.enabled is true, but no middleware is "
                "installed; install the package 'observability' or set it to false"
            )
        for wrapper in wrappers:
            client = cast("DataPlaneClient", wrapper.load()(client, observability))
    return client


def _load_client(impl: str) -> Any:
    found: dict[str, EntryPoint] = {entry.name: entry for entry in entry_points(group=CLIENT_GROUP)}
    if impl not in found:
        raise ConfigError(
            f"data-plane config: impl: found {impl!r}; expected one of the installed clients "
            f"{', '.join(repr(name) for name in sorted(found))}"
        )
    return found[impl].load()
