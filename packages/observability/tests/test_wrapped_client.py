"""A wrapped client keeps every promise of the client inside, and hides nothing of it."""

import inspect

import pytest
import torch
from tensordict import TensorDict

from dataplane_core import (
    Capabilities,
    DataPlaneClient,
    InMemoryDataPlaneClient,
    KVBatchMeta,
    build_data_plane_client,
)
from dataplane_core.testing import (
    BackpressureContract,
    DataPlaneClientContract,
    LeaseContract,
    OriginContract,
)
from observability import MetricsDataPlaneClient, ObservedClient


class TestWrappedClient(DataPlaneClientContract, OriginContract):
    @pytest.fixture
    def client(self):
        with MetricsDataPlaneClient(InMemoryDataPlaneClient()) as client:
            yield client

    @pytest.fixture
    def peer(self, client):
        return MetricsDataPlaneClient(InMemoryDataPlaneClient(bootstrap=False))


class MakeWrapped:
    @pytest.fixture
    def make_client(self):
        clients = []

        def make(**config):
            inner = InMemoryDataPlaneClient({"enabled": True, "impl": "in_memory", **config})
            clients.append(MetricsDataPlaneClient(inner))
            return clients[-1]

        yield make
        for client in clients:
            client.close()


class TestWrappedLeases(MakeWrapped, LeaseContract):
    pass


class TestWrappedBackpressure(MakeWrapped, BackpressureContract):
    pass


class Echo:
    """A client that only reports how it was called."""

    capabilities = Capabilities()

    def __getattr__(self, name):
        def called(*args, **kwargs):
            raise LookupError((name, args, kwargs))

        return called


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("register_partition", ("p", ["x"], 1, ["t"], 2, {"x": ["v"]})),
        ("claim_meta", ("p", "t", ["x"], 4, 1, False, 2.5)),
        ("check_consumption_status", ("p", ["t"])),
        ("put_samples", (["a"], "p", None, [{}])),
        ("get_samples", (["a"], "p", ["x"])),
        ("clear_samples", (["a"], "p")),
        ("clear_samples", (None, "p")),
    ],
)
def test_arguments_and_further_keywords_reach_the_inner_client_as_they_are(name, args):
    client = MetricsDataPlaneClient(Echo())
    with pytest.raises(LookupError) as called:
        getattr(client, name)(*args, also=1)
    assert called.value.args[0] == (name, args, {"also": 1})


@pytest.mark.parametrize("name", ["acknowledge", "renew", "release", "count_samples"])
def test_calls_that_move_no_data_are_passed_on_without_an_event(name):
    events = []
    client = MetricsDataPlaneClient(Echo(), events.append)
    args = ("p", "t", ["x"]) if name == "count_samples" else (KVBatchMeta("p", "t", ["a"]),)
    with pytest.raises(LookupError) as called:
        getattr(client, name)(*args)
    assert called.value.args[0] == (name, args, {})
    assert events == []


def test_every_method_of_the_contract_is_passed_on():
    methods = {name for name, _ in inspect.getmembers(DataPlaneClient, inspect.isfunction)}
    public = {name for name in methods if not name.startswith("_")}
    assert public <= vars(ObservedClient).keys()


def test_a_keyword_that_the_inner_client_does_not_know_is_refused():
    events = []
    with MetricsDataPlaneClient(InMemoryDataPlaneClient(), events.append) as client:
        with pytest.raises(TypeError, match="colour"):
            client.put_samples([], "p", colour=1)
        assert events[-1]["status"] == "error"


def test_capabilities_are_those_of_the_inner_client():
    inner = Echo()
    client = MetricsDataPlaneClient(inner)
    assert client.capabilities is inner.capabilities
    assert client.inner is inner


def test_the_factory_wraps_a_client_when_observability_is_enabled():
    events = []
    cfg = {
        "enabled": True,
        "impl": "in_memory",
        "observability": {"enabled": True, "callback": events.append},
    }
    with build_data_plane_client(cfg) as client:
        assert isinstance(client, MetricsDataPlaneClient)
        client.register_partition("train", ["x"], 1, [])
        client.put_samples(["a"], "train", TensorDict({"x": torch.zeros(1)}, [1]))
    assert [event["op"] for event in events] == ["register", "put", "close"]


def test_without_a_callback_the_factory_logs(capsys):
    cfg = {"enabled": True, "impl": "in_memory", "observability": {"enabled": True}}
    build_data_plane_client(cfg).close()
    assert "op=close" in capsys.readouterr().out
