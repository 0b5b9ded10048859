"""A wrapped client fulfills all promises of the inner client and forwards all of its methods."""

import inspect

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from dataplane_core import (
    Capabilities,
    DataPlaneClient,
    DataPlaneError,
    InMemoryDataPlaneClient,
    KVBatchMeta,
    UnsupportedError,
    build_data_plane_client,
)
from dataplane_core.testing import (
    BackpressureContract,
    DataPlaneClientContract,
    LeaseContract,
    MinimalClient,
    NamedClaimContract,
    OriginContract,
)
from observability import (
    InstrumentedDataPlaneClient,
    LifecycleDataPlaneClient,
    MeterDataPlaneClient,
    MetricsDataPlaneClient,
    ObservedClient,
    TracingDataPlaneClient,
)


@pytest.mark.usefixtures("sdk")
class TestWrappedClient(DataPlaneClientContract):
    @pytest.fixture(params=[MetricsDataPlaneClient, InstrumentedDataPlaneClient])
    def client(self, request):
        with request.param(InMemoryDataPlaneClient()) as client:
            yield client
            assert client.failures == 0

    @pytest.fixture
    def peer(self, client):
        return type(client)(InMemoryDataPlaneClient(bootstrap=False))


class TestWrappedOrigins(OriginContract):
    @pytest.fixture
    def client(self):
        with MetricsDataPlaneClient(InMemoryDataPlaneClient()) as client:
            yield client

    @pytest.fixture
    def peer(self, client):
        return MetricsDataPlaneClient(InMemoryDataPlaneClient(bootstrap=False))


@pytest.mark.usefixtures("sdk")
class TestWrappedLeases(LeaseContract, NamedClaimContract, BackpressureContract):
    @pytest.fixture(params=[MetricsDataPlaneClient, InstrumentedDataPlaneClient])
    def make_client(self, request):
        clients = []

        def make(**config):
            inner = InMemoryDataPlaneClient({"enabled": True, "impl": "in_memory", **config})
            clients.append(request.param(inner))
            return clients[-1]

        yield make
        for client in clients:
            client.close()


@pytest.mark.parametrize(
    "wrap",
    [
        InstrumentedDataPlaneClient,
        LifecycleDataPlaneClient,
        MeterDataPlaneClient,
        MetricsDataPlaneClient,
        TracingDataPlaneClient,
    ],
)
def test_a_client_with_only_documented_methods_can_be_wrapped(wrap):
    inner = MinimalClient()
    client = wrap(inner)
    client.register_partition("train", ["x"], 2, ["train"])
    fields = TensorDict({"x": torch.arange(2.0)}, [2])
    client.put_samples(["a", "b"], "train", fields, [{"k": 1}, {"k": 2}])
    client.put_columns(["a", "b"], "train", {"y": torch.ones(2, 2)}, lengths=[1, 2], ragged=["y"])
    meta = client.claim_meta("train", "train", ["x", "y"], 2)
    assert meta.tags == [{"k": 1}, {"k": 2}]
    assert client.get_data(meta)["x"].tolist() == [0.0, 1.0]
    assert client.get_columns(["b"], "train", ["y"])["y"].tolist() == [[1.0, 1.0]]
    assert client.check_consumption_status("train", ["train"])
    client.withdraw_samples(["a"], "train")
    client.clear_samples(["b"], "train")
    assert not client.check_consumption_status("train", ["train"])
    assert client.inner is inner
    assert not client.capabilities.origins
    assert client.failures == 0
    client.close()


class WithoutRepr:
    def __repr__(self):
        raise RuntimeError("no repr")


def nested(depth):
    return [nested(depth - 1)] if depth else []


@pytest.mark.usefixtures("sdk")
@pytest.mark.parametrize("hostile", [WithoutRepr(), nested(900), None, b"p"], ids=lambda _: "")
def test_no_observer_fails_on_refused_arguments(hostile):
    with InstrumentedDataPlaneClient(InMemoryDataPlaneClient()) as client:
        client.register_partition("p", ["x"], 1, ["t"])
        for call in (
            lambda: client.register_partition(hostile, ["x"], 1, ["t"]),
            lambda: client.claim_meta(hostile, "t", ["x"], 1),
            lambda: client.put_samples(["a"], hostile),
            lambda: client.put_samples(hostile, "p"),
            lambda: client.get_samples(hostile, "p", ["x"]),
            lambda: client.get_samples(["a"], hostile, ["x"]),
            lambda: client.clear_samples(["a"], hostile),
            lambda: client.acknowledge(hostile),
        ):
            with pytest.raises(DataPlaneError):
                call()
        assert client.failures == 0


@pytest.mark.usefixtures("sdk")
@pytest.mark.parametrize("wrap", [MetricsDataPlaneClient, InstrumentedDataPlaneClient])
@pytest.mark.parametrize(
    "ids", [np.array(["a", "b"]), [np.str_("a"), "b"], {"a": 1, "b": 2}.keys()]
)
def test_sample_ids_need_not_be_a_list(wrap, ids):
    with wrap(InMemoryDataPlaneClient()) as client:
        client.register_partition("p", ["x"], 2, ["t"])
        client.put_samples(ids, "p", TensorDict({"x": torch.zeros(2)}, [2]))
        if wrap is MetricsDataPlaneClient:
            assert client.snapshot()["bytes_outstanding"] == 8
        client.put_columns(
            ids, "p", {"y": torch.zeros(2, 99)}, lengths=np.array([99, 98], np.int8), ragged=["y"]
        )
        if wrap is MetricsDataPlaneClient:
            assert client.snapshot()["bytes_outstanding"] == 8 + 4 * (99 + 98)
        client.get_samples(ids, "p", ["x"])
        client.clear_samples(ids, "p")
        if wrap is MetricsDataPlaneClient:
            assert client.snapshot()["bytes_outstanding"] == 0
        assert client.failures == 0


class RaisingClient:
    """Client whose methods raise a `LookupError` with their name and arguments."""

    capabilities = Capabilities()

    def __getattr__(self, name):
        def called(*args, **kwargs):
            raise LookupError((name, args, kwargs))

        return called


WITH_EVENT = [
    ("register_partition", ("p", ["x"], 1, ["t"], 2, {"x": ["v"]})),
    ("claim_meta", ("p", "t", ["x"], 4, 1, False, 2.5)),
    ("check_consumption_status", ("p", ["t"])),
    ("put_samples", (["a"], "p", None, [{}])),
    ("get_samples", (["a"], "p", ["x"])),
    ("clear_samples", (["a"], "p")),
    ("clear_samples", (None, "p")),
]
WITHOUT_EVENT = [
    *((name, (KVBatchMeta("p", "t", ["a"]),)) for name in ("acknowledge", "renew", "release")),
]


@pytest.mark.parametrize(("name", "args"), [*WITH_EVENT, *WITHOUT_EVENT])
def test_a_call_is_forwarded_and_is_an_event_if_it_has_event(name, args):
    events = []
    client = MetricsDataPlaneClient(RaisingClient(), events.append)
    has_event = (name, args) in WITH_EVENT
    extra = {"also": 1} if has_event else {}
    with pytest.raises(LookupError) as called:
        getattr(client, name)(*args, **extra)
    assert called.value.args[0] == (name, args, extra)
    assert [event["status"] for event in events] == ["error"] * has_event


def test_every_method_of_the_contract_is_forwarded():
    methods = {name for name, _ in inspect.getmembers(DataPlaneClient, inspect.isfunction)}
    public = {name for name in methods if not name.startswith("_")}
    assert public <= vars(ObservedClient).keys()
    inner = InMemoryDataPlaneClient()
    client = ObservedClient(inner, ())
    assert client.inner is inner
    assert client.capabilities is inner.capabilities


def test_inspector_of_a_documented_client_is_its_own_or_itself():
    with InMemoryDataPlaneClient() as store:
        store.register_partition("train", ["x"], 2, ["train"])

        class WithInspector(MinimalClient):
            inspector = store.inspector

        class AsInspector(type(store.inspector), MinimalClient):
            def __init__(self):
                vars(self).update(vars(store.inspector))

        for inner in (WithInspector(), AsInspector()):
            [summary] = ObservedClient(inner, ()).inspector.list_partitions()
            assert summary.partition_id == "train"
    with pytest.raises(UnsupportedError, match="inspection"):
        _ = ObservedClient(MinimalClient(), ()).inspector


def test_a_keyword_unknown_to_the_inner_client_is_refused():
    client = MetricsDataPlaneClient(InMemoryDataPlaneClient())
    with client, pytest.raises(TypeError, match="color"):
        client.put_samples([], "p", color=1)


def test_factory_wraps_a_client_if_observability_is_enabled(capsys):
    events = []
    observability = {"enabled": True, "callback": events.append}
    cfg = {"enabled": True, "impl": "in_memory", "observability": observability}
    with build_data_plane_client(cfg) as client:
        assert isinstance(client, MetricsDataPlaneClient)
        client.register_partition("train", ["x"], 1, [])
    assert [event["op"] for event in events] == ["register", "close"]
    assert capsys.readouterr().out == ""
    del observability["callback"]  # without it, events are logged
    build_data_plane_client(cfg).close()
    assert "op=close" in capsys.readouterr().out


def test_override_of_get_columns_need_not_accept_lengths():
    class Published(InMemoryDataPlaneClient):
        def get_columns(self, sample_ids, partition_id, select_fields, *, pad_values=None, width=0):
            return super().get_columns(
                sample_ids, partition_id, select_fields, pad_values=pad_values, width=width
            )

    for inner in (Published(), MetricsDataPlaneClient(Published())):
        client = MetricsDataPlaneClient(inner)
        client.register_partition("p", ["x"], 1, [])
        client.put_samples(["a"], "p", TensorDict({"x": torch.ones(1, 2)}, [1]))
        read = client.get_columns(["a"], "p", ["x"], width=4, lengths=[2])
        assert read["x"].tolist() == [[1.0, 1.0]]


def test_lengths_decide_forms_in_a_wrapped_store_without_forms():
    class Formless(MinimalClient):
        def get_samples(self, sample_ids, partition_id, select_fields):
            rows = list(super().get_samples(sample_ids, partition_id, select_fields)["x"])
            return TensorDict({"x": torch.nested.as_nested_tensor(rows, layout=torch.jagged)}, [1])

    client = MetricsDataPlaneClient(Formless())
    client.register_partition("p", ["x"], 1, [])
    client.put_samples(["a"], "p", TensorDict({"x": torch.ones(1, 2)}, [1]))
    for lengths, width in (([2], 4), ([3], 2)):
        read = client.get_columns(["a"], "p", ["x"], width=4, lengths=lengths)
        assert read["x"].shape == (1, width)
