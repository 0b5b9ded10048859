"""A traced step on a real Ray: the exact tree of spans, every link, and the sample events."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from grpo_trainer import RunDisplay, TrainerError, train
from observability.receiver import Receiver, read_folder
from observability.records import Records, Span

STEPS = 2
"""Number of complete steps; in the next one, a policy worker is killed."""
VICTIM = "grpo.policy 1"
SAMPLES = 64  # 8 prompts of 8, in optimizer steps of 32, on two ranks

LOGPROBS = """
    compute_logprobs [policy 0]
      receive train [policy 0] idle
      get train [policy 0] overhead
      forward [policy 0] productive
      send train [policy 0] overhead
      settle train [policy 0] overhead
    compute_logprobs [policy 1]
      receive train [policy 1] idle
      get train [policy 1] overhead
      forward [policy 1] productive
      send train [policy 1] overhead
      settle train [policy 1] overhead"""

TRAIN = """
    train [policy {rank}]
      receive train [policy {rank}] idle
      get train [policy {rank}] overhead
      optimizer_step [policy {rank}] productive
      optimizer_step [policy {rank}] productive
      settle train [policy {rank}] overhead"""

TURN = """
      turn [rollout]
        generate [rollout] idle
          generate [generation] productive
        environment_step [rollout] idle
          step [environment] productive"""

PUBLISH = """
    publish_weights [policy {rank}] overhead
      refit.publish [policy {rank}]"""

TREE = f"""
grpo.step [driver]
  refit [driver] idle{PUBLISH.format(rank=0)}{PUBLISH.format(rank=1)}
    install_weights [generation] overhead
      refit.receive [generation]
        refit.plan [generation]
        refit.transfer [generation]
        refit.verify [generation]
        refit.compile [generation]
        refit.install [generation]
  register train [driver] overhead
  rollout [driver] idle
    rollout_to_tq [rollout]{TURN}{TURN}
      flatten [rollout] overhead
      send train [rollout] overhead
  logprobs [driver] idle{LOGPROBS}
  reference [driver] idle{LOGPROBS}
  advantages [driver] overhead
    send train [driver] overhead
  train [driver] idle{TRAIN.format(rank=0)}{TRAIN.format(rank=1)}
  clear [driver] overhead
    settle train [driver] overhead
"""


@pytest.fixture(scope="module")
def traced(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    folder = tmp_path_factory.mktemp("traced")
    with Receiver(folder / "telemetry") as receiver:
        with pytest.raises(TrainerError, match="policy worker 1"):
            train(traced_config(folder, receiver.endpoint), display=RankKiller(receiver))
        # The run has failed, and every process but the killed one has exported its telemetry.
        yield Traced(receiver.snapshot(), read_folder(folder / "telemetry"))


def traced_config(folder: Path, endpoint: str, **changes: Any) -> Any:
    from integration.conftest import configured

    return configured(
        folder,
        {
            "grpo.num_steps": STEPS + 1,
            "grpo.num_prompts_per_step": 8,
            "grpo.num_generations_per_prompt": 8,
            "policy.global_batch_size": 32,
            "policy.micro_batch_size": 16,
            "tracing.enabled": True,
            "tracing.endpoint": endpoint,
            **changes,
        },
    )


@dataclass
class Traced:
    """The telemetry of a run.

    Attributes:
        records: telemetry of all steps.
        stored: the same telemetry, read from files.
        steps: spans of each complete step.
    """

    records: Records
    stored: Records
    steps: list[list[Span]] = field(init=False)

    def __post_init__(self) -> None:
        by_trace: dict[str, list[Span]] = {}
        for span in self.records.spans:
            by_trace.setdefault(span.trace_id, []).append(span)
        steps = sorted(by_trace.values(), key=lambda spans: min(s.start_ns for s in spans))
        self.steps = steps[:STEPS]


def drawn(spans: list[Span]) -> str:
    """Return the tree of spans as text: ranks by number, other spans by start."""
    children: dict[str | None, list[Span]] = {}
    for span in spans:
        children.setdefault(span.parent_id, []).append(span)

    first: dict[tuple[str | None, str], int] = {}
    for span in spans:
        key = span.parent_id, span.name
        first[key] = min(span.start_ns, first.get(key, span.start_ns))

    def order(span: Span) -> tuple[int, str, int]:
        of_rank = span.process.service == "grpo.policy" and span.name in (
            "publish_weights",
            "compute_logprobs",
            "train",
        )
        if of_rank:
            return first[span.parent_id, span.name], span.process.instance, 0
        return span.start_ns, "", span.start_ns

    def lines(parent: str | None, depth: int) -> Iterator[str]:
        for span in sorted(children.get(parent, ()), key=order):
            process = span.process.label.removeprefix("grpo.")
            bucket = span.attributes.get("rl.bucket", "")
            yield f"{'  ' * depth}{span.name} [{process}] {bucket}".rstrip()
            yield from lines(span.span_id, depth + 1)

    return "\n" + "\n".join(lines(None, 0)) + "\n"


def named(spans: list[Span], name: str, service: str) -> list[Span]:
    return [s for s in spans if s.name == name and s.process.service == f"grpo.{service}"]


def test_step_is_one_trace_with_exactly_these_spans(traced: Traced) -> None:
    assert [drawn(spans) for spans in traced.steps] == [TREE] * STEPS
    assert [len(spans) for spans in traced.steps] == [TREE.strip().count("\n") + 1] * STEPS


def test_every_span_is_within_its_parent(traced: Traced) -> None:
    for spans in traced.steps:
        by_id = {span.span_id: span for span in spans}
        assert [span.name for span in spans if span.parent_id is None] == ["grpo.step"]
        for span in spans:
            if span.parent_id is not None:
                parent = by_id[span.parent_id]
                assert parent.start_ns <= span.start_ns <= span.end_ns <= parent.end_ns


def test_every_span_carries_run_step_and_weight_version(traced: Traced) -> None:
    run_ids = {span.attributes["rl.run_id"] for span in traced.records.spans}
    assert len(run_ids) == 1
    for step, spans in enumerate(traced.steps):
        assert {span.attributes["rl.step"] for span in spans} == {step}
        assert {span.attributes["rl.weight_version"] for span in spans} == {step}


def test_every_process_has_its_pid(traced: Traced) -> None:
    pids = {span.process.label: span.process.pid for span in traced.records.spans}
    assert pids.keys() == {
        "grpo.driver",
        "grpo.rollout",
        "grpo.generation",
        "grpo.environment",
        "grpo.policy 0",
        "grpo.policy 1",
    }
    assert len(set(pids.values())) == len(pids)
    assert pids["grpo.driver"] == os.getpid()


def test_reads_link_to_the_puts_of_their_data(traced: Traced) -> None:
    for spans in traced.steps:
        [rollout] = named(spans, "send train", "rollout")
        [advantages] = named(spans, "send train", "driver")
        written = named(spans, "send train", "policy")
        assert len(written) == 4  # two columns by two ranks
        for read in named(spans, "get train", "policy"):
            linked = {link.span_id for link in read.links}
            assert {link.trace_id for link in read.links} == {read.trace_id}
            if "advantages" in read.attributes["dataplane.fields"]:
                # A rank trains on samples that both ranks scored.
                assert linked == {
                    rollout.span_id,
                    advantages.span_id,
                    *(s.span_id for s in written),
                }
            else:
                assert linked == {rollout.span_id}
        others = [span for span in spans if span.links and span.name != "get train"]
        # A claim links to the put of the samples that it takes.
        assert {span.name for span in others} == {"receive train"}


def test_events_account_for_every_sample_of_every_operation(traced: Traced) -> None:
    for step, spans in enumerate(traced.steps):
        events = [e for e in traced.records.events if e.attributes.get("rl.step") == step]
        counted = Counter((e.name, e.process.service.removeprefix("grpo.")) for e in events)
        waited = {service for name, service in counted if name == "waiting"}
        for service in waited:  # their number depends on the machine's speed
            assert counted.pop(("waiting", service)) == counted.pop(("answered", service))
        assert counted == {
            ("registered", "driver"): 1,
            ("refit_installed", "generation"): 1,
            ("put", "rollout"): 1,
            ("claimed", "policy"): 6,
            ("read", "policy"): 6,
            ("put", "policy"): 4,
            ("put", "driver"): 1,
            ("trained", "policy"): 2,
            ("acknowledged", "policy"): 6,
            ("cleared", "driver"): 1,
        }
        ids = {e.name: set() for e in events}
        for event in events:
            ids[event.name] |= set(event.sample_ids)
        assert {len(ids[name]) for name in ("put", "claimed", "trained", "cleared")} == {SAMPLES}
        spans_by_id = {span.span_id for span in spans}
        assert all(e.span_id in spans_by_id and e.trace_id == spans[0].trace_id for e in events)


def test_no_span_names_a_sample(traced: Traced) -> None:
    ids = {sample_id for event in traced.records.events for sample_id in event.sample_ids}
    values = [str(v) for span in traced.records.spans for v in span.attributes.values()]
    assert ids
    assert not [value for value in values if any(sample_id in value for sample_id in ids)]


def test_files_hold_the_received_telemetry(traced: Traced) -> None:
    assert sorted(s.span_id for s in traced.stored.spans) == sorted(
        s.span_id for s in traced.records.spans
    )
    assert len(traced.stored.events) == len(traced.records.events)


class RankKiller(RunDisplay):
    """A display that kills a policy worker when the step after `STEPS` starts to train."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._trained = 0

    def phase(self, name: str) -> None:
        """See `RunDisplay.phase`."""
        if name != "train":
            return
        self._trained += 1
        if self._trained == STEPS + 1:
            records = self._receiver.wait_for(has_the_victims_steps, 60)
            pids = {s.process.pid for s in records.spans if s.process.label == VICTIM}
            os.kill(pids.pop(), signal.SIGKILL)


def has_the_victims_steps(records: Records) -> bool:
    """Return whether all spans and events of the complete steps in the victim have arrived.

    A process exports its spans in the order in which they end, and its events in the order in which
    they happen. The two do not wait for each other.
    """
    spans = [s for s in records.spans if s.process.label == VICTIM and s.name == "train"]
    acknowledged = [
        e
        for e in records.events
        if e.process.label == VICTIM
        and e.name == "acknowledged"
        and e.attributes.get("rl.step") in range(STEPS)
    ]
    return len(spans) == STEPS and len(acknowledged) == 3 * STEPS


def test_trace_of_a_killed_actor_is_incomplete(traced: Traced) -> None:
    from observability.views import steps_of

    *complete, last = steps_of(traced.records)
    assert [step.incomplete for step in complete] == [[]] * STEPS
    assert any("grpo.driver" in reason and "WorkerError" in reason for reason in last.incomplete)


@pytest.mark.long  # observability's tests cover every kind of missing collector
def test_run_continues_without_a_collector(cluster: None, tmp_path: Path) -> None:
    with Receiver() as receiver:
        endpoint = receiver.endpoint  # after it is closed, no process listens there
    result = train(traced_config(tmp_path, endpoint))
    assert len(result.history) == STEPS + 1
    assert threading.active_count() < 100
