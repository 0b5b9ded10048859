"""Steps are put together from whatever arrived, and say what is missing."""

import dataclasses
import random

import pytest
from told_runs import (
    DRIVER,
    GENERATION,
    POLICIES,
    ROLLOUT,
    Teller,
    grpo_step,
    ns,
    run_of,
    sample_ids,
)

from observability.records import Records
from observability.views import (
    StageBytes,
    Staleness,
    bucket_seconds,
    bytes_by_stage,
    slowest,
    steps_of,
    waste,
)


def only(records):
    (step,) = steps_of(records)
    return step


def test_a_run_is_its_steps_in_order_whatever_the_order_of_arrival():
    records = run_of(4)
    random.Random(1).shuffle(records.spans)
    random.Random(2).shuffle(records.events)
    steps = steps_of(records)
    assert [(step.run_id, step.number) for step in steps] == [("run-a", n) for n in range(4)]
    assert [step.root.name for step in steps] == ["grpo.step"] * 4
    assert [step.incomplete for step in steps] == [[]] * 4
    assert [step.seconds for step in steps] == [10.0] * 4


def test_runs_do_not_mix():
    records = grpo_step(1, run_id="late", at=100)
    records.add(grpo_step(0, run_id="early"))
    assert [(step.run_id, step.number) for step in steps_of(records)] == [("early", 0), ("late", 1)]


def test_a_trace_that_tells_no_step_is_none():
    records = grpo_step()
    (first, *_) = records.spans
    outside = dataclasses.replace(first, trace_id="f" * 32, attributes={"rl.run_id": "run-a"})
    records.spans.append(outside)
    assert len(steps_of(records)) == 1


def test_a_step_number_told_as_text_is_understood():
    records = grpo_step()
    records.spans = [
        dataclasses.replace(span, attributes={**span.attributes, "rl.step": "7"})
        for span in records.spans
    ]
    assert only(records).number == 7


def test_children_are_found_by_their_parent():
    step = only(grpo_step())
    names = [span.name for span in step.children(step.root.span_id)]
    assert names[:3] == ["refit", "register train", "rollout"]
    assert step.children("nowhere") == ()


def test_what_was_sent_twice_counts_once():
    records = grpo_step()
    once = only(records)
    records.add(grpo_step())
    twice = only(records)
    assert len(twice.spans) == len(once.spans)
    assert len(twice.events) == len(once.events)
    assert bytes_by_stage(twice) == bytes_by_stage(once)
    assert twice.staleness == once.staleness


def test_a_step_without_a_root_is_shown_and_says_so():
    records = grpo_step()
    records.spans = [span for span in records.spans if span.name != "grpo.step"]
    step = only(records)
    assert step.root is None
    assert step.incomplete[0] == "no root: the span of the whole step has not arrived"
    assert (step.start_ns, step.end_ns) == (ns(0.1), ns(9.9))
    assert [one.stage for one in bytes_by_stage(step)] == [
        "rollout",
        "logprobs",
        "advantages",
        "train",
    ]


def test_an_orphan_is_named_with_its_process():
    records = grpo_step()
    records.spans = [
        span for span in records.spans if (span.name, span.process) != ("turn", ROLLOUT)
    ]
    reasons = only(records).incomplete
    assert len(reasons) == 2
    assert reasons[0].endswith(
        "of 'generate' of grpo.rollout, 'environment_step' of grpo.rollout never arrived"
    )


def test_a_failed_span_of_the_driver_is_named_with_its_error():
    tell = Teller()
    root = tell.span("grpo.step", DRIVER, 0, 2)
    tell.span("train", DRIVER, 0, 1, root, "wasted", outcome="error", message="CUDA\nout")
    tell.span("forward", POLICIES[0], 0, 1, root, "wasted", outcome="error")
    assert only(tell.records).incomplete == ["'train' of grpo.driver failed: CUDA\\nout"]


def test_two_roots_are_told_and_the_step_is_that_named_as_one():
    tell = Teller()
    tell.span("stray", ROLLOUT, 0, 1)
    root = tell.span("grpo.step", DRIVER, 1, 2)
    step = only(tell.records)
    assert step.root is root
    assert step.incomplete == [
        "2 spans have no parent: 'stray' of grpo.rollout, 'grpo.step' of grpo.driver"
    ]


def test_spans_that_are_their_own_ancestors_are_told():
    tell = Teller()
    tell.span("grpo.step", DRIVER, 0, 2)
    tell.span("loop", ROLLOUT, 0, 1, f"{2:08x}{0:08x}")
    assert only(tell.records).incomplete == [
        "spans that are their own ancestors: 'loop' of grpo.rollout"
    ]


def test_processes_of_one_name_are_told_apart():
    tell = Teller()
    again = dataclasses.replace(DRIVER, pid=999)
    root = tell.span("grpo.step", DRIVER, 0, 2)
    tell.span("refit", again, 0, 1, root)
    labels = only(tell.records).labels
    assert labels == {
        DRIVER: "grpo.driver (100@node-a)",
        again: "grpo.driver (999@node-a)",
    }


def test_bytes_are_counted_per_stage_puts_and_gets_apart():
    assert bytes_by_stage(only(grpo_step(policies=2))) == [
        StageBytes("rollout", 8_000, 0),
        StageBytes("logprobs", 8_000, 16_000),
        StageBytes("advantages", 4_000, 0),
        StageBytes("train", 0, 12_000),
    ]


def test_bytes_of_spans_that_hang_on_nothing_are_not_lost():
    tell = Teller()
    tell.span("grpo.step", DRIVER, 0, 2)
    tell.put(ROLLOUT, 0, 1, "f" * 16, ["a"], ["x"], 7)
    assert bytes_by_stage(only(tell.records)) == [StageBytes("(no stage)", 7, 0)]


def test_seconds_per_bucket_count_each_moment_of_a_process_once():
    tell = Teller()
    root = tell.span("grpo.step", DRIVER, 0, 10)
    outer = tell.span("advantages", DRIVER, 0, 4, root, "overhead")
    tell.span("send train", DRIVER, 1, 3, outer, "overhead")
    tell.span("train", DRIVER, 4, 10, root, "idle")
    tell.span("forward", POLICIES[0], 4, 8, root, "productive")
    tell.span("forward", POLICIES[0], 6, 9, root, "productive")
    tell.span("get train", POLICIES[0], 8, 10, root, "overhead")
    assert bucket_seconds(only(tell.records)) == {
        "productive": 5.0,
        "overhead": 5.0,
        "wasted": 0.0,
        "idle": 6.0,
    }


def test_staleness_is_the_versions_between_generation_and_training():
    tell = Teller(step=3)
    root = tell.span("grpo.step", DRIVER, 0, 10)
    put, train = "put", "trained"
    tell.event(put, ROLLOUT, 1, ["a", "b"], root, version=3, fields=["input_ids"])
    tell.event(put, ROLLOUT, 2, ["c"], root, version=1, fields=["input_ids"])
    tell.event(put, ROLLOUT, 2, ["d"], root, fields=["input_ids"])
    tell.event(put, POLICIES[0], 4, ["a", "b", "c"], root, version=3, fields=["prev_logprobs"])
    tell.event(train, POLICIES[0], 5, ["a", "b"], root, version=4)
    tell.event(train, POLICIES[1], 5, ["b", "c", "d"], root, version=4)
    assert only(tell.records).staleness == Staleness(1, 5 / 3, 3, 3, 1)


def test_staleness_reaches_back_to_puts_of_earlier_steps():
    records = grpo_step(0)
    later = Teller(step=4)
    root = later.span("grpo.step", DRIVER, 40, 50)
    later.event("trained", POLICIES[0], 45, sample_ids(0)[:1], root, version=5)
    records.add(later.records)
    assert steps_of(records)[1].staleness == Staleness(5, 5.0, 5, 1, 0)


def steps_with_the_same_ids(*, skew=0.0, clear=("a", "b")):
    """Five steps that put, train and clear samples of the same ids; who puts has its own clock."""
    records = Records()
    for step in range(5):
        tell, at = Teller(step), 20 * step
        root = tell.span("grpo.step", DRIVER, at, at + 10)
        call = tell.span("rollout", DRIVER, at, at + 4, root)
        # Its only call, so it shows how far the clock is ahead.
        tell.span("rollout", GENERATION, at + skew, at + 4 + skew, call)
        ids = ["a", "b"]
        tell.event("put", GENERATION, at + 3 + skew, ids, call, version=step, fields=["x"])
        tell.event("trained", POLICIES[0], at + 7, ids, root, version=step)
        tell.event("put", DRIVER, at + 8, ids, root, version=step + 1, fields=["y"])
        tell.event("cleared", DRIVER, at + 9, clear, root)
        records.add(tell.records)
    return records


@pytest.mark.parametrize("clear", [("a", "b"), ()])
@pytest.mark.parametrize("skew", [0.0, 5.0, -11.5])
def test_ids_that_are_used_again_after_a_clear_are_as_fresh_as_new_ones(clear, skew):
    steps = steps_of(steps_with_the_same_ids(skew=skew, clear=clear))
    assert [step.staleness for step in steps] == [Staleness(0, 0.0, 0, 2, 0)] * 5


def test_what_was_not_cleared_keeps_the_version_that_it_was_generated_with():
    steps = steps_of(steps_with_the_same_ids(clear=["a"]))
    assert [(step.staleness.least, step.staleness.most) for step in steps] == [
        (0, stale) for stale in range(5)
    ]


def test_what_is_told_as_trained_after_its_clear_is_as_old_as_it_was():
    tell = Teller(step=3)
    root = tell.span("grpo.step", DRIVER, 0, 10)
    tell.event("put", ROLLOUT, 1, ["a"], root, version=1, fields=["x"])
    tell.event("cleared", DRIVER, 2, [], root)
    tell.event("trained", POLICIES[0], 3, ["a"], root, version=3)
    assert only(tell.records).staleness == Staleness(2, 2.0, 2, 1, 0)


def test_what_is_told_as_trained_before_its_put_is_told_is_as_old_as_it_is():
    tell = Teller(step=3)
    root = tell.span("grpo.step", DRIVER, 0, 10)
    # A claim that waited got it before the put returned.
    tell.event("trained", POLICIES[0], 2, ["a", "b"], root, version=3)
    tell.event("put", ROLLOUT, 2.1, ["a"], root, version=1, fields=["x"])
    tell.event("put", POLICIES[0], 2.2, ["a"], root, version=3, fields=["y"])
    assert only(tell.records).staleness == Staleness(2, 2.0, 2, 1, 1)


def test_staleness_of_runs_that_use_the_same_ids_does_not_mix():
    records = Records()
    for number, (run, version) in enumerate((("killed", 40), ("second", 3))):
        tell = Teller(0, run, f"{number + 1:032x}")
        root = tell.span("grpo.step", DRIVER, 100 * number, 100 * number + 10)
        tell.event("put", ROLLOUT, 100 * number + 1, ["a", "b"], root, version=version)
        if run == "second":
            tell.event("trained", POLICIES[0], 105, ["a", "b"], root, version=version)
            tell.event("cleared", DRIVER, 106, ["a", "b"], root)
        records.add(tell.records)
    killed, second = steps_of(records)
    assert (killed.staleness, second.staleness) == (None, Staleness(0, 0.0, 0, 2, 0))


def test_staleness_is_not_known_without_versions():
    tell = Teller()
    tell.span("grpo.step", DRIVER, 0, 10)
    assert only(tell.records).staleness is None


def test_slowest_operations_are_spans_without_children_the_longest_first():
    found = slowest(only(grpo_step()))
    assert len(found) == 10
    assert [span.name for span in found[:4]] == ["generate", "generate", "forward", "forward"]
    assert {span.process for span in found[:2]} == {GENERATION}
    assert [span.seconds for span in found] == sorted(
        (span.seconds for span in found), reverse=True
    )


def test_waste_is_the_share_of_dropped_samples_times_productive_rollout():
    lost = waste(only(grpo_step(samples=8)))
    assert (lost.dropped, lost.put, lost.share) == (2, 8, 0.25)
    assert lost.productive_seconds == pytest.approx(2 * 1.46 + 2 * 0.26)
    assert lost.seconds == pytest.approx(lost.productive_seconds / 4)


def test_a_step_without_samples_wastes_nothing():
    tell = Teller()
    tell.span("grpo.step", DRIVER, 0, 10)
    assert waste(only(tell.records)).seconds == 0.0


def test_events_without_a_trace_belong_to_the_step_that_they_tell():
    tell = Teller()
    tell.span("grpo.step", DRIVER, 0, 10)
    tell.event("dropped", DRIVER, 5, ["a"], None, reason="surplus")
    assert [event.name for event in only(tell.records).events] == ["dropped"]


def test_no_records_are_no_steps():
    assert steps_of(Records()) == []
