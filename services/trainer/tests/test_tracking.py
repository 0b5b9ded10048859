"""Metric sinks get a run's configuration and metrics, and cannot stop or delay it.

Sinks that fail or hang are stand-ins, since no configuration makes a library do so. TensorBoard is
real, and so are MLflow with a file as its database and Weights & Biases offline.
So internals are imported.
"""

from __future__ import annotations

import struct
import sys
import threading
import time

import pytest
import yaml

import grpo_trainer
from grpo_trainer import DEMO_CONFIG, check_config
from grpo_trainer.errors import ConfigurationError
from grpo_trainer.report import tracking
from grpo_trainer.report.tracking import Tracking, tracking_of

WAIT_S = 200.0
SECRET = "hunter2"


class Recorder:
    """A sink that records its calls; ``failing`` is the method that raises."""

    def __init__(self, failing=""):
        self.failing, self.calls = failing, []

    def _call(self, name, *values):
        self.calls.append((name, *values))
        if name == self.failing:
            raise OSError(f"{name} failed\nsecond line")

    def start(self, config):
        self._call("start", config)

    def log(self, step, metrics):
        self._call("log", step, metrics)

    def close(self, status):
        self._call("close", status)


def record(step, reward=0.5):
    return {"step": step, "reward": reward, "samples": 8, "seconds": {"rollout": 1.5}}


def tracked(sinks, notices, *, last_step=2):
    return Tracking(sinks, {"a": 1}, last_step=last_step, notice=notices.append)


def test_a_sink_gets_configuration_metrics_and_the_end():
    sink, notices = Recorder(), []
    with tracked({"one": sink}, notices) as run:
        run.log(record(1))
        run.log(record(2, reward=1.0))
    metrics = {"reward": 0.5, "samples": 8.0, "seconds/rollout": 1.5}
    assert sink.calls == [
        ("start", {"a": 1}),
        ("log", 1, metrics),
        ("log", 2, metrics | {"reward": 1.0}),
        ("close", "finished"),
    ]
    assert notices == []


@pytest.mark.parametrize(
    ("steps", "error", "status"), [(1, None, "stopped"), (2, OSError, "failed")]
)
def test_the_end_of_a_run_is_named(steps, error, status):
    sink = Recorder()
    try:
        with tracked({"one": sink}, []) as run:
            for step in range(1, steps + 1):
                run.log(record(step))
            if error:
                raise error
    except OSError:
        assert error is OSError
    assert sink.calls[-1] == ("close", status)


@pytest.mark.parametrize("failing", ["start", "log", "close"])
def test_a_failing_sink_is_reported_once_and_called_no_more(failing):
    sink, other, notices = Recorder(failing), Recorder(), []
    with tracked({"one": sink, "other": other}, notices, last_step=3) as run:
        for step in (1, 2, 3):
            run.log(record(step))
    assert [name for name, *_ in sink.calls].count(failing) == 1
    assert sink.calls[-1][0] == failing
    assert [name for name, *_ in other.calls] == ["start", "log", "log", "log", "close"]
    reason = f"OSError: {failing} failed second line"
    assert notices == [f"tracking.sinks: one failed: {reason}; it gets no more metrics"]


class Hanging(Recorder):
    """A sink that hangs in its first call until the test ends."""

    def __init__(self):
        super().__init__()
        self.released = threading.Event()

    def start(self, config):
        self.released.wait(WAIT_S)
        self._call("start", config)


@pytest.fixture
def hanging():
    sink = Hanging()
    yield sink
    sink.released.set()


def test_a_hanging_sink_hardly_delays_steps_and_the_end(hanging, monkeypatch):
    monkeypatch.setattr(tracking, "_CLOSE_S", 0.2)
    other, notices = Recorder(), []
    began = time.monotonic()
    with tracked({"one": hanging, "other": other}, notices, last_step=100) as run:
        for step in range(1, 101):
            run.log(record(step))
    assert time.monotonic() - began < WAIT_S / 2
    assert other.calls[-1] == ("close", "finished")
    reason = "it did not end within 0.2 s"
    assert notices == [f"tracking.sinks: one failed: {reason}; it gets no more metrics"]


def test_calls_of_a_hanging_sink_are_bounded(hanging, monkeypatch):
    monkeypatch.setattr(tracking, "_MAX_PENDING", 5)
    notices = []
    with tracked({"one": hanging}, notices) as run:
        for step in range(1, 101):
            run.log(record(step))
        assert notices == [
            "tracking.sinks: one failed: it is 5 steps behind; it gets no more metrics"
        ]
    hanging.released.set()
    assert len(notices) == 1


def test_a_missing_library_is_refused_before_the_run(configure, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it was not installed
    (tmp_path / "mlflow").mkdir()  # such as MLflow's own, in the working folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "mlflow"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    config = configure(
        {"tracking.sinks": ["wandb", "mlflow"], "run.output": str(tmp_path / "runs")}
    )
    with pytest.raises(ConfigurationError) as caught:
        grpo_trainer.train(config)
    assert str(caught.value) == (
        "tracking.sinks: 'wandb' is not installed; install the extra grpo-trainer[wandb]; "
        "'mlflow' is not installed; install the extra grpo-trainer[mlflow]"
    )
    assert not (tmp_path / "runs").exists()


def tensorboard_points(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tracking" / "tensorboard")).Reload()
    text = events.Tensors("configuration/text_summary")[0].tensor_proto.string_val[0]
    assert b'"learning_rate": 0.001' in text
    return [(event.step, round(event.value, 3)) for event in events.Scalars("reward")]


def mlflow_run(folder):
    from mlflow import MlflowClient

    client = MlflowClient()
    return client, client.get_run((folder / "tracking" / "mlflow_run_id").read_text())


def mlflow_points(folder):
    client, run = mlflow_run(folder)
    assert (run.info.status, run.info.run_name) == ("FINISHED", folder.name)
    assert run.data.params["policy.optimizer.learning_rate"] == "0.001"
    assert client.get_experiment(run.info.experiment_id).name == "demo-vllm"
    assert run.data.metrics["seconds/rollout"] == 1.5
    history = client.get_metric_history(run.info.run_id, "reward")
    return [(metric.step, metric.value) for metric in history]


def wandb_records(path):
    """Yield the records of an offline run: LevelDB's log format after a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, at, message = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:  # the end of a block is padded
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        message += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a complete record, or the last part of one
            yield wandb_internal_pb2.Record.FromString(message)
            message = b""


def wandb_points(folder):
    import wandb

    wandb.teardown()  # its process writes the last records after `finish` returns, so let it end
    points, ids, exits = [], set(), []
    for path in sorted((folder / "tracking" / "wandb").glob("offline-run-*/*.wandb")):
        for each in wandb_records(path):
            kind = each.WhichOneof("record_type")
            if kind == "run":
                ids.add((each.run.run_id, each.run.project, each.run.display_name))
                config = {item.key: item.value_json for item in each.run.config.update}
                assert '"learning_rate":0.001' in config["policy"].replace(" ", "")
            elif kind == "history":
                items = {item.key or "/".join(item.nested_key): item for item in each.history.item}
                values = {name: float(item.value_json) for name, item in items.items()}
                points.append((values["step"], values["reward"]))
            elif kind == "exit":
                exits.append(each.exit.exit_code)
    own = (folder / "tracking" / "wandb_run_id").read_text()
    assert (ids, exits) == ({(own, "demo-vllm", folder.name)}, [0, 0])
    return points


@pytest.fixture
def offline(monkeypatch, tmp_path):
    monkeypatch.setattr(tracking, "_CLOSE_S", WAIT_S)  # the machine may be busy
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    for name in ("MLFLOW_EXPERIMENT_NAME", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)


def with_sinks(*sinks):
    """Return the configuration of the demo of vLLM, with credentials where it may have some."""
    raw = yaml.safe_load(DEMO_CONFIG.with_name("demo-vllm.yaml").read_text())
    raw["policy"]["generation"]["environment"]["HF_TOKEN"] = SECRET
    raw["policy"]["generation"]["arguments"] += ["--api-key", SECRET]
    raw["policy"]["generation"]["command"] += [f"--token={SECRET}"]
    raw["tracing"]["endpoint"] = f"https://user:{SECRET}@collector.example"
    raw["tracking"]["sinks"] = list(sinks)
    raw["grpo"]["num_steps"] = 5
    return check_config(raw, source="test")


REPEATED = [(1, 0.1), (2, 0.1), (3, 0.1), (3, 0.2), (4, 0.2), (5, 0.2)]
LIBRARIES = {"tensorboard": [], "mlflow": ["sqlalchemy", "alembic"], "wandb": []}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sink", "points", "expected"),
    [
        # TensorBoard hides the step of the first attempt that the resumed run repeats.
        ("tensorboard", tensorboard_points, [*REPEATED[:2], *REPEATED[3:]]),
        ("mlflow", mlflow_points, REPEATED),
        ("wandb", wandb_points, REPEATED),
    ],
    ids=["tensorboard", "mlflow", "wandb"],
)
def test_a_resumed_run_continues_in_the_same_record(offline, tmp_path, sink, points, expected):
    for library in (sink, *LIBRARIES[sink]):
        pytest.importorskip(library, reason=f"needs the package {library}")
    folder, notices = tmp_path / "20261127-120000", []
    folder.mkdir()
    for done, last, reward in ((0, 3, 0.1), (2, 5, 0.2)):
        with tracking_of(with_sinks(sink), folder, done, notices.append) as run:
            for step in range(done + 1, last + 1):
                run.log(record(step, reward))
    assert notices == []
    assert points(folder) == expected
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or SECRET.encode() not in path.read_bytes(), path


@pytest.mark.slow
@pytest.mark.parametrize(("error", "status"), [(None, "KILLED"), (OSError, "FAILED")])
def test_mlflow_shows_how_a_run_ended(offline, tmp_path, error, status):
    for library in ("mlflow", *LIBRARIES["mlflow"]):
        pytest.importorskip(library, reason=f"needs the package {library}")
    notices = []
    try:
        with tracking_of(with_sinks("mlflow"), tmp_path, 0, notices.append) as run:
            run.log(record(1))
            if error:
                raise error
    except OSError:
        assert error is OSError
    assert notices == []
    _, stored = mlflow_run(tmp_path)
    assert stored.info.status == status
