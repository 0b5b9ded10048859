"""Builds clients by name; adapters and middleware register through entry points.

A distribution adds an ``impl`` by an entry point in the group ``dataplane_core.clients``, called as
``factory(cfg, bootstrap=...)``. It adds a middleware by an entry point in the group
``dataplane_core.middleware``, called as ``wrap(client, observability_cfg)``.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, cast  # Any: configuration from YAML

from dataplane_core.capabilities import Capabilities
from dataplane_core.client import DataPlaneClient
from dataplane_core.config import DataPlaneConfig, validate_config
from dataplane_core.errors import ConfigError
from dataplane_core.shadowing import require_package

CLIENT_GROUP = "dataplane_core.clients"
MIDDLEWARE_GROUP = "dataplane_core.middleware"
_PROMISES = {"claim_lease_s": "leases", "claim_order": "claim_order"}
"""Capability that a client needs to honor an optional configuration key, by key."""


def build_data_plane_client(
    cfg: DataPlaneConfig | Mapping[str, Any] | None, *, bootstrap: bool = True
) -> DataPlaneClient:
    """Build the client that ``cfg["impl"]`` names, wrapped in middleware if that is enabled.

    Args:
        cfg: see `DataPlaneConfig`.
        bootstrap: True in the one process that starts the store, False to attach to it.

    Raises:
        ConfigError: (a ValueError) ``cfg`` is None, not enabled or invalid, names an impl that no
            installed distribution provides, or sets a key that this client does not support.
    """
    valid = validate_config(cfg)
    if not valid["enabled"]:
        raise ConfigError("data-plane config: enabled is false; set it to true to build a client")
    client = _load_client(valid["impl"])(valid, bootstrap=bootstrap)
    try:
        _check_promises(client, valid)
        observability = valid.get("observability")
        if observability is not None and observability["enabled"]:
            wrappers = sorted(entry_points(group=MIDDLEWARE_GROUP), key=lambda entry: entry.name)
            if not wrappers:
                raise ConfigError(
                    "data-plane config: observability.enabled is true, but no middleware is "
                    "installed; install the package 'observability' or set it to false"
                )
            for wrapper in wrappers:
                client = _load(wrapper)(client, observability)
    except BaseException:  # whatever failed, the caller gets no client that it could close
        client.close()
        raise
    return cast("DataPlaneClient", client)


def _check_promises(client: Any, valid: DataPlaneConfig) -> None:
    """Refuse a configuration key that the client would ignore.

    Raises:
        ConfigError: (a ValueError) the client lacks the capability that the key needs.
    """
    capabilities = getattr(client, "capabilities", Capabilities())
    for key, promise in _PROMISES.items():
        value = valid.get(key)
        if value is not None and not getattr(capabilities, promise):
            raise ConfigError(
                f"data-plane config: {key}: found {value!r}; {valid['impl']!r} lacks "
                f"capabilities.{promise}, so remove the key"
            )


def _load_client(impl: str) -> Any:
    clients: dict[str, EntryPoint] = {
        entry.name: entry for entry in entry_points(group=CLIENT_GROUP)
    }
    if impl not in clients:
        raise ConfigError(
            f"data-plane config: impl: found {impl!r}; expected one of the installed clients "
            f"{', '.join(repr(name) for name in sorted(clients))}"
        )
    return _load(clients[impl])


def _load(entry: EntryPoint) -> Any:
    """Load an entry point; if a folder shadows its package, the error names the folder."""
    try:
        return entry.load()
    except ModuleNotFoundError:
        package, _, module = entry.module.partition(".")
        require_package(package, module.partition(".")[0])
        raise
