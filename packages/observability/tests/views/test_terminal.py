"""Terminal output is complete, fits the width and escapes received text."""

import dataclasses
import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up_runs import (
    DRIVER,
    HOSTILE,
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
from rich.console import Console

from observability.records import Records
from observability.views import (
    lineage_of,
    lineage_view,
    printable,
    step_view,
    steps_of,
    steps_view,
    waits_view,
    why,
)


def text_of(view, width=100, color_system=None, encoding="utf-8"):
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="\n")
    console = Console(
        file=file, width=width, color_system=color_system, force_terminal=bool(color_system)
    )
    console.print(view)
    file.flush()
    return file.buffer.getvalue().decode(encoding)


def test_each_span_has_a_line_with_process_start_and_duration():
    text = text_of(step_view(step_of(grpo_step())))
    assert "step 0 of run run-a: 10.0 s   46 spans" in text
    (line,) = [line for line in text.splitlines() if "install_weights" in line and "▓" in line]
    assert line.split()[:8] == [
        *("*", "│", "└", "install_weights", "grpo.generation", "500", "ms", "380")
    ]
    waterfall = text.partition("Processes")[0]
    critical = [line[0] == "*" for line in waterfall.splitlines() if "forward" in line]
    assert sorted(critical) == [False, True]
    assert waterfall.count("optimizer_step") == 8
    assert "share one" not in waterfall


def test_a_failed_span_is_marked_without_color():
    records = grpo_step()
    (failed,) = [span for span in records.spans if span.name == "install_weights"]
    spans = [
        dataclasses.replace(span, outcome="error") if span is failed else span
        for span in records.spans
    ]
    text = text_of(step_view(step_of(dataclasses.replace(records, spans=spans))))
    (line,) = [line for line in text.splitlines() if " failed" in line and "▓" in line]
    assert "install_weights failed" in line


def test_figures_of_a_step_are_shown():
    text = text_of(step_view(step_of(grpo_step())))
    for expected in (
        "grpo.policy 0     4.42 s   44.2 %  5.58 s   55.8 %",
        "logprobs    8.00 kB  16.0 kB",
        "dropped: 2 of 8 samples, 25.0 %, worth 860 ms of productive rollout",
        "staleness: 1 to 1 versions, mean 1.00, of 6 samples",
        "shorter segments",
    ):
        assert expected in text


def test_critical_path_segments_add_up_to_the_step():
    text = text_of(step_view(step_of(grpo_step())))
    table = text.partition("Critical path")[2].partition("Bytes by stage")[0]
    shares = [float(share) for share in re.findall(r"([\d.]+) %", table)]
    assert len(shares) == 20 + 1
    assert sum(shares) == pytest.approx(100, abs=1)


@pytest.mark.parametrize(
    ("n_bytes", "size"),
    [(0, "0 B"), (999, "999 B"), (12_300, "12.3 kB"), (4_500_000_000, "4.50 GB")],
)
def test_sizes_have_three_digits_and_a_unit(n_bytes, size):
    maker = TraceMaker()
    root = maker.span("grpo.step", DRIVER, 0, 1)
    maker.put(DRIVER, 0, 1, root, ["a"], ["x"], n_bytes)
    assert f" {size} " in text_of(step_view(step_of(maker.records)))


@given(st.text() | st.sampled_from(HOSTILE))
def test_printable_text_has_only_visible_characters(text):
    assert printable(text).isprintable()
    assert printable(printable(text)) == printable(text)
    assert printable("a\x1b[31m\n\x00\u202eb") == "a\\x1b[31m\\n\\x00\\u202eb"
    assert printable("grüße 東京 [ok]") == "grüße 東京 [ok]"


@pytest.mark.parametrize("width", [60, 100, 180])
def test_lines_fit_the_terminal(width):
    text = text_of(step_view(step_of(grpo_step())), width)
    assert max(map(len, text.splitlines())) <= width


def test_buckets_are_distinguishable_without_color():
    text = text_of(step_view(step_of(grpo_step())))
    for mark, name in zip("█▓x░─", ["productive", "overhead", "wasted", "idle"], strict=False):
        assert f"{mark * 2} {name}" in text
    assert "\x1b" not in text


def test_output_for_an_ascii_terminal_is_ascii():
    records = grpo_step(policies=8)
    text = text_of(steps_view(steps_of(records)), encoding="ascii")
    assert "##" in text
    assert "optimizer_step x32" in text
    records.spans[0] = dataclasses.replace(records.spans[0], name="größe")
    assert "gr??e" in text_of(steps_view(steps_of(records)), encoding="ascii")
    options = {"task": "train", "wait": "1", "fields": ["µ…"], "since_ns": ns(0)}
    maker = TraceMaker()
    maker.event("waiting", POLICIES[0], 1, [], **options)
    assert text_of(waits_view(why(maker.records, ns(2))), encoding="ascii")
    assert text_of(lineage_view("ü", []), encoding="ascii")


def test_many_similar_siblings_share_a_line_with_their_count():
    maker = TraceMaker()
    root = maker.span("grpo.step", DRIVER, 0, 100)
    train = maker.span("train", POLICIES[0], 0, 100, root)
    for index in range(80):
        maker.span("optimizer_step", POLICIES[0], index, index + 0.5, train, "productive")
    waterfall = text_of(step_view(step_of(maker.records))).partition("Processes")[0]
    assert "82 spans in 3 lines: similar siblings share a line" in waterfall
    (line,) = [line for line in waterfall.splitlines() if "optimizer_step" in line]
    assert "optimizer_step \N{MULTIPLICATION SIGN}80" in line
    assert "40.0 s" in line
    waterfall = text_of(step_view(step_of(grpo_step(policies=8)))).partition("Processes")[0]
    assert "optimizer_step \N{MULTIPLICATION SIGN}32" in waterfall
    assert "8 processes" in waterfall


def test_lines_beyond_the_maximum_are_omitted_with_a_note():
    maker = TraceMaker()
    root = maker.span("grpo.step", DRIVER, 0, 100)
    for index in range(300):
        maker.span(f"odd {index}", DRIVER, 0, 1, root)
    text = text_of(step_view(step_of(maker.records)))
    assert "the last 61 lines are omitted" in text


def test_an_incomplete_step_says_why():
    maker = TraceMaker()
    maker.span("refit", DRIVER, 0, 1, "f" * 16)
    text = text_of(step_view(step_of(maker.records)))
    assert "incomplete: no root: the span of the step was not received" in text
    assert (
        "incomplete: the parent ffffffffffffffff of 'refit' of grpo.driver was not received" in text
    )


@given(trees())
def test_any_tree_can_be_shown(records):
    text = text_of(step_view(step_of(records)))
    assert max(map(len, text.splitlines())) <= 100
    waterfall = [line for line in text.splitlines() if line[:1] in "* " and " grpo." in line]
    assert len(waterfall) >= len(records.spans)
    # Each bar is contiguous and visible.
    assert all(re.search(r" [█▓x░─]+ *$", line) for line in waterfall[: len(records.spans)])


def test_lineage_is_a_table():
    records = grpo_step(policies=1)
    sample_id = sample_ids()[0]
    text = text_of(lineage_view(sample_id, lineage_of(sample_id, records)))
    assert f"sample {sample_id}" in text
    (line,) = [line for line in text.splitlines() if "trained" in line]
    assert line.split()[:8] == ["4.52", "s", "trained", "grpo.policy", "0", "train", "0", "1"]


def test_each_wait_is_one_sentence():
    maker = TraceMaker()
    options = {"task": "train", "fields": ["x"], "wait": "1", "since_ns": ns(0)}
    maker.event("waiting", POLICIES[0], 1, [], samples=4, **options)
    text = text_of(waits_view(why(maker.records, ns(2))), 160)
    assert text.startswith(
        "1. task 'train' in grpo.policy 0 has been blocked for 2.00 s on 4 samples "
        "of partition 'train'"
    )
    assert text_of(waits_view([])).strip() == "No task is blocked."


@pytest.mark.parametrize("hostile", HOSTILE)
def test_markup_and_escapes_in_names_are_printed_literally(hostile):
    process = dataclasses.replace(ROLLOUT, service=hostile)
    maker = TraceMaker(run_id=hostile)
    root = maker.span(hostile, process, 0, 1, bucket=hostile, outcome="error", message=hostile)
    maker.put(process, 0, 1, root, [hostile], [hostile], 3)
    options = {"task": hostile, "fields": [hostile], "wait": "1", "since_ns": ns(0)}
    maker.event("waiting", process, 1, [], **options)
    records = maker.records
    plain = text_of(step_view(step_of(records)))
    plain += text_of(lineage_view(hostile, lineage_of(hostile, records)))
    plain += text_of(waits_view(why(records, ns(2))))
    assert all(line.isprintable() for line in plain.split("\n"))
    colored = text_of(step_view(step_of(records)), color_system="standard")
    assert "\x1b[31mred" not in colored
    assert printable(hostile)[:12] in plain


def test_several_steps_are_shown_one_below_the_other():
    text = text_of(steps_view(steps_of(run_of(2))))
    assert text.index("step 0 of run") < text.index("step 1 of run")
    assert "no steps" in text_of(steps_view(steps_of(Records())))
