"""Steps are assembled from any received records and report what is missing."""

import dataclasses
import random

import pytest
from hypothesis import given
from made_up_runs import (
    DRIVER,
    GENERATION,
    POLICIES,
    ROLLOUT,
    TraceMaker,
    grpo_step,
    ns,
    run_of,
    sample_ids,
    step_of,
    trees,
)

from observability.records import Records
from observability.views import (
    StageBytes,
    Staleness,
    bytes_by_stage,
    slowest,
    steps_of,
    waste,
)


def test_steps_are_in_order_whatever_the_order_of_arrival():
    records = run_of(4)
    random.Random(1).shuffle(records.spans)
    random.Random(2).shuffle(records.events)
    steps = steps_of(records)
    assert [(step.run_id, step.number) for step in steps] == [("run-a", n) for n in range(4)]
    assert [step.root.name for step in steps] == ["grpo.step"] * 4
    assert [step.incomplete for step in steps] == [[]] * 4
    assert [step.seconds for step in steps] == [10.0] * 4


def test_steps_of_different_runs_are_separate():
    records = grpo_step(1, run_id="late", at=100)
    records.add(grpo_step(0, run_id="early"))
    assert [(step.run_id, step.number) for step in steps_of(records)] == [("early", 0), ("late", 1)]


def test_a_trace_without_rl_step_is_not_a_step():
    records = grpo_step()
    (first, *_) = records.spans
    unrelated = dataclasses.replace(first, trace_id="f" * 32, attributes={"rl.run_id": "run-a"})
    records.spans.append(unrelated)
    assert len(steps_of(records)) == 1
    assert steps_of(Records()) == []


def test_records_received_twice_count_once():
    records = grpo_step()
    expected = step_of(records)
    records.add(grpo_step())
    result = step_of(records)
    assert len(result.spans) == len(expected.spans)
    assert len(result.events) == len(expected.events)
    assert bytes_by_stage(result) == bytes_by_stage(expected)
    assert result.staleness == expected.staleness


def test_a_step_without_a_root_is_reported_as_incomplete():
    records = grpo_step()
    records.spans = [span for span in records.spans if span.name != "grpo.step"]
    step = step_of(records)
    assert step.root is None
    assert step.incomplete[0] == "no root: the span of the step was not received"
    assert (step.start_ns, step.end_ns) == (ns(0.1), ns(9.9))
    assert [item.stage for item in bytes_by_stage(step)] == [
        "rollout",
        "logprobs",
        "advantages",
        "train",
    ]


def test_a_missing_parent_is_reported_with_its_orphans():
    records = grpo_step()
    records.spans = [
        span for span in records.spans if (span.name, span.process) != ("turn", ROLLOUT)
    ]
    reasons = step_of(records).incomplete
    assert len(reasons) == 2
    assert reasons[0].endswith(
        "of 'generate' of grpo.rollout, 'environment_step' of grpo.rollout was not received"
    )


def test_a_failed_driver_span_is_reported_with_its_error():
    maker = TraceMaker()
    root = maker.span("grpo.step", DRIVER, 0, 2)
    maker.span("train", DRIVER, 0, 1, root, "wasted", outcome="error", message="CUDA\nout")
    maker.span("forward", POLICIES[0], 0, 1, root, "wasted", outcome="error")
    assert step_of(maker.records).incomplete == ["'train' of grpo.driver failed: CUDA\\nout"]


def test_two_roots_are_reported_and_grpo_step_is_the_root():
    maker = TraceMaker()
    maker.span("stray", ROLLOUT, 0, 1)
    root = maker.span("grpo.step", DRIVER, 1, 2)
    step = step_of(maker.records)
    assert step.root is root
    assert step.incomplete == [
        "2 spans have no parent: 'stray' of grpo.rollout, 'grpo.step' of grpo.driver"
    ]


def test_processes_with_the_same_name_have_distinct_labels():
    maker = TraceMaker()
    other_driver = dataclasses.replace(DRIVER, pid=999)
    root = maker.span("grpo.step", DRIVER, 0, 2)
    maker.span("refit", other_driver, 0, 1, root)
    labels = step_of(maker.records).labels
    assert labels == {
        DRIVER: "grpo.driver (100@node-a)",
        other_driver: "grpo.driver (999@node-a)",
    }


def test_put_and_get_bytes_are_counted_per_stage():
    assert bytes_by_stage(step_of(grpo_step(policies=2))) == [
        StageBytes("rollout", 8_000, 0),
        StageBytes("logprobs", 8_000, 16_000),
        StageBytes("advantages", 4_000, 0),
        StageBytes("train", 0, 12_000),
    ]


def test_bytes_of_orphan_spans_are_counted():
    maker = TraceMaker()
    maker.span("grpo.step", DRIVER, 0, 2)
    maker.put(ROLLOUT, 0, 1, "f" * 16, ["a"], ["x"], 7)
    assert bytes_by_stage(step_of(maker.records)) == [StageBytes("(no stage)", 7, 0)]


def test_staleness_counts_versions_from_generation_to_training():
    maker = TraceMaker(step=3)
    root = maker.span("grpo.step", DRIVER, 0, 10)
    put, train = "put", "trained"
    maker.event(put, ROLLOUT, 1, ["a", "b"], root, version=3, fields=["input_ids"])
    maker.event(put, ROLLOUT, 2, ["c"], root, version=1, fields=["input_ids"])
    maker.event(put, ROLLOUT, 2, ["d"], root, fields=["input_ids"])
    maker.event(put, POLICIES[0], 4, ["a", "b", "c"], root, version=3, fields=["prev_logprobs"])
    maker.event(train, POLICIES[0], 5, ["a", "b"], root, version=4)
    maker.event(train, POLICIES[1], 5, ["b", "c", "d"], root, version=4)
    assert step_of(maker.records).staleness == Staleness(1, 5 / 3, 3, 3, 1)


def test_staleness_uses_puts_of_earlier_steps():
    records = grpo_step(0)
    later = TraceMaker(step=4)
    root = later.span("grpo.step", DRIVER, 40, 50)
    later.event("trained", POLICIES[0], 45, sample_ids(0)[:1], root, version=5)
    records.add(later.records)
    assert steps_of(records)[1].staleness == Staleness(5, 5.0, 5, 1, 0)


def steps_with_the_same_ids(*, skew=0.0, clear=("a", "b")):
    """Return five steps that reuse sample ids; the producer's clock is `skew` seconds ahead."""
    records = Records()
    for step in range(5):
        maker, at = TraceMaker(step), 20 * step
        root = maker.span("grpo.step", DRIVER, at, at + 10)
        call = maker.span("rollout", DRIVER, at, at + 4, root)
        # The only call to the producer, so it alone shows how far its clock is ahead.
        maker.span("rollout", GENERATION, at + skew, at + 4 + skew, call)
        ids = ["a", "b"]
        maker.event("put", GENERATION, at + 3 + skew, ids, call, version=step, fields=["x"])
        maker.event("trained", POLICIES[0], at + 7, ids, root, version=step)
        maker.event("put", DRIVER, at + 8, ids, root, version=step + 1, fields=["y"])
        maker.event("cleared", DRIVER, at + 9, clear, root)
        records.add(maker.records)
    return records


@pytest.mark.parametrize("clear", [("a", "b"), ()])
@pytest.mark.parametrize("skew", [0.0, 5.0, -11.5])
def test_reused_ids_have_the_staleness_of_new_ones(clear, skew):
    steps = steps_of(steps_with_the_same_ids(skew=skew, clear=clear))
    assert [step.staleness for step in steps] == [Staleness(0, 0.0, 0, 2, 0)] * 5


def test_uncleared_samples_keep_their_generating_version():
    steps = steps_of(steps_with_the_same_ids(clear=["a"]))
    assert [(step.staleness.minimum, step.staleness.maximum) for step in steps] == [
        (0, maximum) for maximum in range(5)
    ]


def test_staleness_is_right_for_trained_reported_after_clear():
    maker = TraceMaker(step=3)
    root = maker.span("grpo.step", DRIVER, 0, 10)
    maker.event("put", ROLLOUT, 1, ["a"], root, version=1, fields=["x"])
    maker.event("cleared", DRIVER, 2, [], root)
    maker.event("trained", POLICIES[0], 3, ["a"], root, version=3)
    assert step_of(maker.records).staleness == Staleness(2, 2.0, 2, 1, 0)


def test_staleness_is_right_for_trained_reported_before_put():
    maker = TraceMaker(step=3)
    root = maker.span("grpo.step", DRIVER, 0, 10)
    # A blocked claim got the sample before the put returned.
    maker.event("trained", POLICIES[0], 2, ["a", "b"], root, version=3)
    maker.event("put", ROLLOUT, 2.1, ["a"], root, version=1, fields=["x"])
    maker.event("put", POLICIES[0], 2.2, ["a"], root, version=3, fields=["y"])
    assert step_of(maker.records).staleness == Staleness(2, 2.0, 2, 1, 1)


@pytest.mark.parametrize("response_s", [2.0, 4.5])
def test_put_of_a_prompt_does_not_change_the_version(response_s):
    maker = TraceMaker(step=3)
    root = maker.span("grpo.step", DRIVER, 0, 10)
    maker.event("put", DRIVER, 1, ["a"], root, fields=["prompt"])
    maker.event("put", ROLLOUT, response_s, ["a"], root, version=3, fields=["generation_logprobs"])
    maker.event("trained", POLICIES[0], 4, ["a"], root, version=5)
    maker.event("cleared", DRIVER, 5, ["a"], root)
    maker.event("put", DRIVER, 6, ["a"], root, fields=["prompt"])
    maker.event("put", ROLLOUT, 7, ["a"], root, version=6, fields=["generation_logprobs"])
    assert step_of(maker.records).staleness == Staleness(2, 2.0, 2, 1, 0)


def test_unversioned_sample_has_no_staleness_if_its_id_is_reused():
    maker = TraceMaker(step=3)
    root = maker.span("grpo.step", DRIVER, 0, 10)
    maker.event("put", ROLLOUT, 1, ["a", "b"], root)
    maker.event("trained", POLICIES[0], 2, ["a"], root, version=5)
    maker.event("cleared", DRIVER, 3, ["a", "b"], root)
    maker.event("trained", POLICIES[0], 4, ["b"], root, version=5)
    maker.event("put", ROLLOUT, 5, ["a", "b", "c"], root, version=5)
    maker.event("trained", POLICIES[0], 6, ["c"], root, version=6)
    assert step_of(maker.records).staleness == Staleness(1, 1.0, 1, 1, 2)


def test_runs_with_the_same_ids_have_separate_staleness():
    records = Records()
    for number, (run, version) in enumerate((("killed", 40), ("second", 3))):
        maker = TraceMaker(0, run, f"{number + 1:032x}")
        root = maker.span("grpo.step", DRIVER, 100 * number, 100 * number + 10)
        maker.event("put", ROLLOUT, 100 * number + 1, ["a", "b"], root, version=version)
        if run == "second":
            maker.event("trained", POLICIES[0], 105, ["a", "b"], root, version=version)
            maker.event("cleared", DRIVER, 106, ["a", "b"], root)
        records.add(maker.records)
    killed, second = steps_of(records)
    assert (killed.staleness, second.staleness) == (None, Staleness(0, 0.0, 0, 2, 0))


def test_slowest_operations_are_leaf_spans_longest_first():
    result = slowest(step_of(grpo_step()))
    assert len(result) == 10
    assert [span.name for span in result[:4]] == ["generate", "generate", "forward", "forward"]
    assert {span.process for span in result[:2]} == {GENERATION}
    assert [span.seconds for span in result] == sorted(
        (span.seconds for span in result), reverse=True
    )


def test_waste_is_the_dropped_share_of_productive_rollout():
    result = waste(step_of(grpo_step(samples=8)))
    assert (result.dropped, result.put, result.share) == (2, 8, 0.25)
    assert result.productive_seconds == pytest.approx(2 * 1.46 + 2 * 0.26)
    assert result.seconds == pytest.approx(result.productive_seconds / 4)


@given(trees())
def test_a_tree_has_every_span_below_its_root(records):
    (step,) = steps_of(records)
    spans = [step.root]
    for span in spans:
        spans += step.children(span.span_id)
    assert sorted(span.span_id for span in spans) == sorted(s.span_id for s in records.spans)


def test_cycles_of_parents_are_cut_at_their_earliest_span():
    maker = TraceMaker()
    first = maker.span("first", DRIVER, 1, 2, f"{3:08x}{0:08x}")
    maker.span("second", DRIVER, 2, 3, first)
    third = maker.span("third", DRIVER, 3, 4, f"{2:08x}{0:08x}")
    tail = maker.span("tail", DRIVER, 0, 1, first)
    self_parent = maker.span("its own parent", DRIVER, 9, 9, f"{5:08x}{0:08x}")
    step = step_of(maker.records)
    assert [span.name for span in step.tree.ancestry(tail.span_id)] == ["tail", "first"]
    assert step.tree.ancestry(self_parent.span_id) == [self_parent]
    assert {span.name for span in step.children(first.span_id)} == {"second", "tail"}
    assert step.children(third.span_id) == ()
    assert step.incomplete[1:] == [
        "spans that are their own ancestors: 'first' of grpo.driver, 'its own parent' of "
        "grpo.driver"
    ]


def test_a_single_step_has_no_waste_and_no_staleness():
    maker = TraceMaker()
    maker.span("grpo.step", DRIVER, 0, 10, attributes={"rl.step": "7"})
    step = step_of(maker.records)
    assert (step.number, step.staleness, waste(step).seconds) == (7, None, 0.0)


def test_events_without_a_trace_belong_to_the_step_they_name():
    maker = TraceMaker()
    maker.span("grpo.step", DRIVER, 0, 10)
    maker.event("dropped", DRIVER, 5, ["a"], None, reason="surplus")
    assert [event.name for event in step_of(maker.records).events] == ["dropped"]
