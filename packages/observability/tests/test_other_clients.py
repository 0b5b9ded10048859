"""The middleware works on any object with the documented methods."""

import pytest
import torch
from tensordict import TensorDict

from dataplane_core.testing import MinimalClient
from observability import MetricsDataPlaneClient
from observability.instruments import InstrumentedDataPlaneClient
from observability.lifecycle import LifecycleDataPlaneClient
from observability.meters import MeterDataPlaneClient
from observability.tracing import TracingDataPlaneClient


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
def test_a_client_with_the_documented_methods_alone_can_be_wrapped(wrap):
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


def test_metrics_count_what_goes_through_such_a_client():
    client = MetricsDataPlaneClient(MinimalClient())
    client.register_partition("train", ["x"], 2, ["train"])
    client.put_samples(["a", "b"], "train", TensorDict({"x": torch.arange(2.0)}, [2]))
    assert client.snapshot()["bytes_outstanding"] == 8
    client.clear_samples(["a"], "train")
    assert client.snapshot()["n_keys_outstanding"] == 1
