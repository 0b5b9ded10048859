"""Each operation has one event with its size, duration and outcome."""

import numpy as np
import pytest
import structlog
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    lazy_stack,
)

from dataplane_core import InMemoryDataPlaneClient, PartitionNotFoundError
from observability import MetricsDataPlaneClient, log_event

KEYS = ["op", "partition_id", "n_keys", "n_bytes", "wall_ms", "status"]


class Recorder:
    """Wrapped in-memory client whose events are recorded."""

    def __init__(self):
        self.events = []
        self.client = MetricsDataPlaneClient(InMemoryDataPlaneClient(), self.events.append)
        self.client.register_partition("train", ["x"], 4, ["logprob"])

    def last(self):
        """Return the values of the last event, without its duration."""
        event = self.events[-1]
        assert list(event) == KEYS
        assert event["wall_ms"] >= 0
        return tuple(event[key] for key in KEYS if key != "wall_ms")


@pytest.fixture
def recorder():
    recorder = Recorder()
    yield recorder
    recorder.client.inner.close()


def batch(count, **fields):
    return TensorDict(fields, batch_size=[count])


def jagged(*lengths, dtype=torch.float32):
    rows = [torch.zeros(length, dtype=dtype) for length in lengths]
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


def strided(*shapes):
    return torch.nested.nested_tensor(
        [torch.zeros(shape) for shape in shapes], layout=torch.strided
    )


def test_each_call_has_one_event(recorder):
    client = recorder.client
    assert recorder.last() == ("register", "train", 4, 0, "ok")
    client.put_samples(["a", "b"], "train", batch(2, x=torch.zeros(2, 3)))
    assert recorder.last() == ("put", "train", 2, 24, "ok")
    meta = client.claim_meta("train", "logprob", ["x"], 3, blocking=False)
    assert recorder.last() == ("claim_meta", "train", 2, 0, "ok")
    client.get_data(meta)
    assert recorder.last() == ("get_data", "train", 2, 24, "ok")
    client.check_consumption_status("train", ["logprob"])
    assert recorder.last() == ("check_consumption_status", "train", 0, 0, "ok")
    client.get_samples(["a"], "train", ["x"])
    assert recorder.last() == ("get", "train", 1, 12, "ok")
    client.clear_samples(["a", "unknown"], "train")
    assert recorder.last() == ("clear", "train", 2, 0, "ok")
    client.clear_samples(None, "train")
    assert recorder.last() == ("clear", "train", 0, 0, "ok")
    client.close()
    assert recorder.last() == ("close", "", 0, 0, "ok")
    assert len(recorder.events) == 9


def test_a_failed_call_has_an_event_and_raises_its_error(recorder):
    with pytest.raises(PartitionNotFoundError, match="'nowhere' is not registered"):
        recorder.client.put_samples(["a"], "nowhere", batch(1, x=torch.zeros(1)))
    assert recorder.last() == ("put", "nowhere", 1, 4, "error")
    with pytest.raises(TimeoutError):
        recorder.client.claim_meta("train", "logprob", ["x"], 1, timeout_s=0.05)
    assert recorder.last() == ("claim_meta", "train", 0, 0, "timeout")
    assert 50 <= recorder.events[-1]["wall_ms"] < 5000


@pytest.mark.parametrize(
    ("fields", "n_bytes"),
    [
        (None, 0),
        (batch(2, x=torch.zeros(2, 3, dtype=torch.bfloat16)), 12),
        (batch(2, x=torch.zeros(2, 0)), 0),
        (batch(2, x=jagged(3, 5), y=torch.zeros(2, dtype=torch.int64)), 48),
        (batch(2, x=jagged(0, 5, dtype=torch.int8)), 5),
        (batch(2, x=strided((2, 3), (3, 2))), 48),
        (batch(2, x=NonTensorStack(NonTensorData("a"), NonTensorData({"b": 1}))), 0),
        (batch(2, x=NonTensorData(np.array(["a", "b"], dtype=object))), 0),
    ],
)
def test_bytes_of_ragged_tensors_are_their_packed_values(recorder, fields, n_bytes):
    recorder.client.put_samples(["a", "b"], "train", fields, [{}, {}])
    assert recorder.last() == ("put", "train", 2, n_bytes, "ok")


def test_a_lazy_stack_is_measured_without_being_stacked(recorder, monkeypatch):
    recorder.client.inner.put_samples = lambda *args: None
    monkeypatch.setattr(LazyStackedTensorDict, "get", None)
    parts = [TensorDict({"x": torch.zeros(n)}) for n in (1, 2)]
    recorder.client.put_samples(["a", "b"], "train", lazy_stack(parts))
    assert recorder.last() == ("put", "train", 2, 12, "ok")


def test_without_a_listener_the_wrapper_is_silent(capsys):
    with MetricsDataPlaneClient(InMemoryDataPlaneClient()) as client:
        client.register_partition("train", ["x"], 2, [])
    assert capsys.readouterr() == ("", "")


def test_a_raising_listener_does_not_change_results():
    def broken(event):
        raise RuntimeError("listener is down")

    client = MetricsDataPlaneClient(InMemoryDataPlaneClient(), broken)
    with structlog.testing.capture_logs() as logged:
        client.register_partition("train", ["x"], 1, ["logprob"])
        client.put_samples(["a"], "train", batch(1, x=torch.zeros(1)))
        assert client.claim_meta("train", "logprob", ["x"], 1).sample_ids == ["a"]
        with pytest.raises(PartitionNotFoundError):
            client.get_samples(["a"], "nowhere", ["x"])
    assert [(line["event"], line["op"]) for line in logged] == [
        ("data_plane_observer_failed", op) for op in ("register", "put", "claim_meta", "get")
    ]
    assert client.failures == 4
    client.close()


def test_the_log_of_a_raising_listener_quotes_no_request(capsys):
    def broken(event):
        raise RuntimeError("listener is down")

    with MetricsDataPlaneClient(InMemoryDataPlaneClient(), broken) as client:
        client.register_partition("train", ["x"], 1, ["logprob"])
        client.put_samples(["sample-of-user"], "train", batch(1, x=torch.zeros(1)))
    printed = "".join(capsys.readouterr())
    assert "RuntimeError: listener is down" in printed
    assert "sample-of-user" not in printed


def test_a_listener_may_read_the_totals():
    seen = []
    client = MetricsDataPlaneClient(
        InMemoryDataPlaneClient(), lambda event: seen.append(client.snapshot())
    )
    client.register_partition("train", ["x"], 2, [])
    client.put_samples(["a"], "train", batch(1, x=torch.zeros(1)))
    assert [totals["bytes_outstanding"] for totals in seen] == [0, 4]
    client.close()


def test_log_event_writes_one_line_per_operation(capsys):
    event = dict(zip(KEYS, ["put", "train\n", 2, 24, 0.5, "ok"], strict=True))
    log_event(event)
    written = capsys.readouterr().out
    assert written.count("\n") == 1
    assert all(name in written for name in ("data_plane_op", *event))
    with structlog.testing.capture_logs() as logged:
        log_event(event)
    assert logged == [{"event": "data_plane_op", "log_level": "info", **event}]
