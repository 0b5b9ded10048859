"""Errors name the wrong key of a configuration; entry points name clients and middleware.

Imports internals: entry points are replaced, so that nothing has to be installed.
"""

from importlib.metadata import EntryPoint

import pytest

from dataplane_core import (
    ConfigError,
    DataPlaneConfig,
    InMemoryDataPlaneClient,
    build_data_plane_client,
    factory,
    validate_config,
)
from dataplane_core.config import REQUIRED_OF_STORES, require_keys

IN_MEMORY = {"enabled": True, "impl": "in_memory"}


def test_the_in_memory_client_is_built_by_name():
    with build_data_plane_client(IN_MEMORY) as client:
        assert isinstance(client, InMemoryDataPlaneClient)
        with build_data_plane_client(IN_MEMORY, bootstrap=False) as attached:
            client.register_partition("p", [], 0, [])
            attached.clear_samples([], "p")


@pytest.mark.parametrize(
    ("cfg", "named"),
    [
        (None, "None"),
        ("abc", "found 'abc' of type str; expected a mapping"),
        ([1], "found .1. of type list; expected a mapping"),
        ({"enabled": False, "impl": "in_memory"}, "enabled is false"),
        ({"enabled": True}, "impl"),
        ({"impl": "in_memory"}, "enabled"),
        ({"enabled": True, "impl": "carrier-pigeon"}, "'carrier-pigeon'.*'in_memory'"),
        ({"enabled": True, "impl": "noop"}, "'noop'"),
        ({**IN_MEMORY, "storage_capcity": 3}, "storage_capcity"),
        ({**IN_MEMORY, "storage_capacity": "many"}, "storage_capacity.*'many'"),
        ({**IN_MEMORY, "storage_capacity": 0}, "storage_capacity.*greater than 0.*found 0"),
        ({**IN_MEMORY, "observability": {"enabled": True, "color": 1}}, "observability.color"),
    ],
)
def test_a_wrong_configuration_is_one_error_that_names_the_key(cfg, named):
    with pytest.raises(ConfigError, match=named):
        build_data_plane_client(cfg)
    assert issubclass(ConfigError, ValueError)


def test_missing_keys_of_a_store_are_named():
    with pytest.raises(ConfigError, match=r"'transfer_queue' needs backend, .*local_buffer_size"):
        require_keys(validate_config(IN_MEMORY), REQUIRED_OF_STORES, impl="transfer_queue")


def test_the_required_keys_are_part_of_the_config_type():
    assert set(REQUIRED_OF_STORES) < set(DataPlaneConfig.__annotations__)


def wrap(client, cfg):
    return (client, cfg)


def build(cfg, *, bootstrap=True):
    return f"client(bootstrap={bootstrap})"


def test_entry_points_add_clients_and_middleware(monkeypatch):
    entries = {
        factory.CLIENT_GROUP: [EntryPoint("other", f"{__name__}:build", factory.CLIENT_GROUP)],
        factory.MIDDLEWARE_GROUP: [EntryPoint("m", f"{__name__}:wrap", factory.MIDDLEWARE_GROUP)],
    }
    monkeypatch.setattr(factory, "entry_points", lambda group: entries[group])
    monkeypatch.setattr(EntryPoint, "load", lambda self: globals()[self.value.split(":")[1]])
    plain = {"enabled": True, "impl": "other"}
    assert build_data_plane_client(plain, bootstrap=False) == "client(bootstrap=False)"
    wrapped = {**plain, "observability": {"enabled": True}}
    assert build_data_plane_client(wrapped) == ("client(bootstrap=True)", {"enabled": True})
    off = {**plain, "observability": {"enabled": False}}
    assert build_data_plane_client(off) == "client(bootstrap=True)"


class PlainClient:
    """Client with the published methods and without capabilities."""

    closed = False

    def __init__(self, cfg, *, bootstrap):
        type(self).closed = False

    def close(self):
        type(self).closed = True


@pytest.mark.parametrize(
    ("key", "value"), [("claim_lease_s", 1.0), ("claim_order", "builtins:len")]
)
def test_a_key_that_a_client_would_ignore_is_refused(monkeypatch, key, value):
    entry = EntryPoint("other", f"{__name__}:PlainClient", factory.CLIENT_GROUP)
    monkeypatch.setattr(factory, "entry_points", lambda group: [entry])
    monkeypatch.setattr(EntryPoint, "load", lambda self: PlainClient)
    with pytest.raises(ConfigError, match=f"{key}.*'other' lacks"):
        build_data_plane_client({"enabled": True, "impl": "other", key: value})
    assert PlainClient.closed


def test_enabled_observability_without_any_middleware_is_refused(monkeypatch):
    real = factory.entry_points
    monkeypatch.setattr(
        factory,
        "entry_points",
        lambda group: [] if group == factory.MIDDLEWARE_GROUP else real(group=group),
    )
    with pytest.raises(ConfigError, match="install the package 'observability'"):
        build_data_plane_client({**IN_MEMORY, "observability": {"enabled": True}})


@pytest.mark.parametrize("failing", ["refuse", "missing"])
def test_client_is_closed_if_a_middleware_fails(monkeypatch, failing):
    def refuse(client, cfg):
        raise OSError("no collector")

    entries = {
        factory.CLIENT_GROUP: [EntryPoint("other", "PlainClient", factory.CLIENT_GROUP)],
        factory.MIDDLEWARE_GROUP: [EntryPoint("m", failing, factory.MIDDLEWARE_GROUP)],
    }
    loaded = {"PlainClient": PlainClient, "refuse": refuse}
    monkeypatch.setattr(factory, "entry_points", lambda group: entries[group])
    monkeypatch.setattr(EntryPoint, "load", lambda self: loaded[self.value])
    with pytest.raises((OSError, KeyError), match=r"no collector|missing"):
        build_data_plane_client(
            {"enabled": True, "impl": "other", "observability": {"enabled": True}}
        )
    assert PlainClient.closed
