"""What the terminal shows is whole, fits, and does nothing but show."""

import dataclasses
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from told_runs import (
    DRIVER,
    HOSTILE,
    POLICIES,
    ROLLOUT,
    Teller,
    grpo_step,
    ns,
    run_of,
    sample_ids,
    trees,
)

from observability.records import Records
from observability.views import (
    life_of,
    lineage_view,
    printable,
    step_view,
    steps_of,
    steps_view,
    waits_view,
    why,
)
from observability.views.waterfall import Bar


def shown(view, width=100, color_system=None, encoding="utf-8"):
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="\n")
    console = Console(
        file=file, width=width, color_system=color_system, force_terminal=bool(color_system)
    )
    console.print(view)
    file.flush()
    return file.buffer.getvalue().decode(encoding)


def step_of(records):
    (step,) = steps_of(records)
    return step


def test_a_step_has_a_line_per_span_with_process_start_and_duration():
    text = shown(step_view(step_of(grpo_step())))
    assert "step 0 of run run-a: 10.0 s   46 spans" in text
    (line,) = [line for line in text.splitlines() if "install_weights" in line and "▓" in line]
    assert line.split()[:8] == [
        *("*", "│", "└", "install_weights", "grpo.generation", "500", "ms", "380")
    ]
    waterfall = text.partition("Processes")[0]
    assert waterfall.count("optimizer_step") == 8
    assert "share one" not in waterfall


def test_the_critical_path_is_marked():
    lines = shown(step_view(step_of(grpo_step()))).partition("Processes")[0].splitlines()
    marked = {line[:60].split()[-1] for line in lines if line.startswith("*") and "forward" in line}
    unmarked = [line for line in lines if not line.startswith("*") and "forward" in line]
    assert marked
    assert len(unmarked) == 1


def test_figures_of_a_step_are_told():
    text = shown(step_view(step_of(grpo_step())))
    for told in (
        "grpo.policy 0      4.420  44.2 %     5.580  55.8 %",
        "logprobs    8.00 kB  16.0 kB",
        "dropped: 2 of 8 samples, 25.0 %, worth 860 ms of productive rollout",
        "staleness: 1 to 1 versions, mean 1.00, of 6 samples",
        "shorter ones together",
    ):
        assert told in text


@pytest.mark.parametrize("width", [60, 100, 180])
def test_lines_fit_the_terminal(width):
    text = shown(step_view(step_of(grpo_step())), width)
    assert max(map(len, text.splitlines())) <= width


def test_buckets_are_told_without_color():
    text = shown(step_view(step_of(grpo_step())))
    for mark, name in zip("█▓x░─", ["productive", "overhead", "wasted", "idle"], strict=False):
        assert f"{mark * 2} {name}" in text
    assert "\x1b" not in text


def test_a_terminal_of_ascii_only_gets_ascii():
    records = grpo_step(policies=8)
    text = shown(steps_view(steps_of(records)), encoding="ascii")
    assert "##" in text
    assert "optimizer_step x32" in text
    records.spans[0] = dataclasses.replace(records.spans[0], name="größe")
    assert "gr??e" in shown(steps_view(steps_of(records)), encoding="ascii")
    told = {"task": "train", "wait": "1", "fields": ["µ…"], "since_ns": ns(0)}
    tell = Teller()
    tell.event("waiting", POLICIES[0], 1, [], **told)
    assert shown(waits_view(why(tell.records, ns(2))), encoding="ascii")
    assert shown(lineage_view("ü", []), encoding="ascii")


def test_many_equal_siblings_share_a_line_that_says_so():
    tell = Teller()
    root = tell.span("grpo.step", DRIVER, 0, 100)
    train = tell.span("train", POLICIES[0], 0, 100, root)
    for place in range(80):
        tell.span("optimizer_step", POLICIES[0], place, place + 0.5, train, "productive")
    waterfall = shown(step_view(step_of(tell.records))).partition("Processes")[0]
    assert "82 spans in 3 lines: equal siblings share one" in waterfall
    (line,) = [line for line in waterfall.splitlines() if "optimizer_step" in line]
    assert "optimizer_step \N{MULTIPLICATION SIGN}80" in line
    assert "40.0 s" in line


def test_siblings_of_several_processes_share_a_line_if_there_are_too_many():
    waterfall = shown(step_view(step_of(grpo_step(policies=8)))).partition("Processes")[0]
    assert "optimizer_step \N{MULTIPLICATION SIGN}32" in waterfall
    assert "8 processes" in waterfall


def test_a_trace_beyond_all_measure_is_cut_and_says_so():
    tell = Teller()
    root = tell.span("grpo.step", DRIVER, 0, 100)
    for place in range(300):
        tell.span(f"odd {place}", DRIVER, 0, 1, root)
    text = shown(step_view(step_of(tell.records)))
    assert "the last 61 lines are left out" in text


def test_an_incomplete_step_says_why():
    tell = Teller()
    tell.span("refit", DRIVER, 0, 1, "f" * 16)
    text = shown(step_view(step_of(tell.records)))
    assert "incomplete: no root: the span of the whole step has not arrived" in text
    assert "incomplete: the parent ffffffffffffffff of 'refit' of grpo.driver never arrived" in text


@given(trees())
def test_any_tree_can_be_shown(records):
    text = shown(step_view(step_of(records)))
    assert max(map(len, text.splitlines())) <= 100


@given(
    st.tuples(st.integers(-50, 150), st.integers(-50, 150)),
    st.integers(1, 40),
)
def test_a_bar_fills_its_width_and_is_never_invisible(stretch, width):
    cells = Bar([stretch], (0, 100), "idle").cells(width, "#")
    assert len(cells) == width
    assert "#" in cells
    assert len(cells.split()) == 1


def test_a_life_is_a_table():
    records = grpo_step(policies=1)
    sample_id = sample_ids()[0]
    text = shown(lineage_view(sample_id, life_of(sample_id, records)))
    assert f"sample {sample_id}" in text
    (line,) = [line for line in text.splitlines() if "trained" in line]
    assert line.split()[:8] == ["4.52", "s", "trained", "grpo.policy", "0", "train", "0", "1"]


def test_waits_are_sentences():
    tell = Teller()
    told = {"task": "train", "fields": ["x"], "wait": "1", "since_ns": ns(0)}
    tell.event("waiting", POLICIES[0], 1, [], samples=4, **told)
    text = shown(waits_view(why(tell.records, ns(2))), 160)
    assert text.startswith(
        "1. task 'train' in grpo.policy 0 has waited 2.00 s for 4 samples of partition 'train'"
    )
    assert shown(waits_view([])).strip() == "nothing waits"


@pytest.mark.parametrize("hostile", HOSTILE)
def test_names_and_ids_of_others_are_shown_not_obeyed(hostile):
    process = dataclasses.replace(ROLLOUT, service=hostile)
    tell = Teller(run_id=hostile)
    root = tell.span(hostile, process, 0, 1, bucket=hostile, outcome="error", message=hostile)
    tell.put(process, 0, 1, root, [hostile], [hostile], 3)
    told = {"task": hostile, "fields": [hostile], "wait": "1", "since_ns": ns(0)}
    tell.event("waiting", process, 1, [], **told)
    records = tell.records
    plain = shown(step_view(step_of(records)))
    plain += shown(lineage_view(hostile, life_of(hostile, records)))
    plain += shown(waits_view(why(records, ns(2))))
    assert all(line.isprintable() for line in plain.split("\n"))
    colored = shown(step_view(step_of(records)), color_system="standard")
    assert "\x1b[31mred" not in colored
    assert printable(hostile)[:12] in plain


def test_several_steps_are_shown_one_below_the_other():
    text = shown(steps_view(steps_of(run_of(2))))
    assert text.index("step 0 of run") < text.index("step 1 of run")
    assert "no step has arrived" in shown(steps_view(steps_of(Records())))
