"""The commands ``show``, ``why`` and ``sample`` of ``python -m observability``.

The commands read the recording of a program that finished, was killed or is still running. The
trainer's command `grpo-trace` uses the functions below the commands.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any  # Any: JSON values

import typer
from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from dataplane_core import PartitionSummary
    from observability.records import Process, Records
    from observability.views import LineageEvent, OpenWait, Step

_ENDED_AFTER_S = 300.0
"""Seconds without a record after which the program of a recording counts as ended: ten times the
interval at which a wait is reported."""
_MAX_RUNS = 5
EXIT_STATUS = "Exit status: 0 on success, 1 on failure, 2 for a wrong option or command."

app = typer.Typer(
    help="Show where the steps of a traced program spend their time, and what is blocked.\n\n"
    "Example: python -m observability show runs/traces/my-run",
    epilog=EXIT_STATUS,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

Recording = Annotated[
    Path,
    typer.Argument(
        path_type=Path,
        metavar="RECORDING",
        help="Folder of an observability.receiver.Receiver, or OTLP as JSON lines: one file or a "
        "folder of files.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Html = Annotated[
    Path | None, typer.Option(path_type=Path, help="File to write the steps to, as one HTML page.")
]
SampleRun = Annotated[
    str | None, typer.Option(help="Show this run; by default the newest that has the sample.")
]
Perfetto = Annotated[
    Path | None,
    typer.Option(path_type=Path, help="File to write the steps to, for ui.perfetto.dev."),
]


class CommandError(Exception):
    """An error that a command reports in one line and with exit status 1."""


class RecordingError(CommandError):
    """An error for a recording that does not exist or is damaged."""


def _print_version(is_requested: bool) -> None:
    if is_requested:
        typer.echo(f"observability {version('observability')}")
        raise typer.Exit


@app.callback()
def _declare_options(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


@app.command("show")
def show_command(
    recording: Recording,
    step: Annotated[int | None, typer.Option(help="Show this step only.")] = None,
    html: Html = None,
    perfetto: Perfetto = None,
    as_json: AsJson = False,
) -> None:
    """Show the waterfall, critical path and figures of each step.

    Example: python -m observability show my-run --step 3 --html step.html
    """
    with _reported_errors():
        show(recording, number=step, html=html, perfetto=perfetto, as_json=as_json)


@app.command("why")
def why_command(recording: Recording, as_json: AsJson = False) -> None:
    """List blocked tasks and what each is blocked on, longest first; silent processes last.

    Example: python -m observability why my-run
    """
    with _reported_errors():
        why(recording, as_json=as_json)


@app.command("sample")
def sample_command(
    sample_id: Annotated[str, typer.Argument(metavar="ID", help="Id of the sample.")],
    recording: Recording,
    run: SampleRun = None,
    as_json: AsJson = False,
) -> None:
    """Show the lifecycle of one sample, from put to clear.

    Example: python -m observability sample p0_g0 my-run
    """
    with _reported_errors():
        sample(sample_id, recording, run_id=run, as_json=as_json)


def show(
    recording: Path,
    *,
    number: int | None = None,
    html: Path | None = None,
    perfetto: Path | None = None,
    as_json: bool = False,
) -> None:
    """Print the steps of a recording and write them to the given paths.

    Args:
        recording: path of the recording.
        number: number of the only step to show; None shows all steps.
        html: path of the page; None writes no page.
        perfetto: path of the file for Perfetto; None writes none.
        as_json: whether to print JSON.

    Raises:
        CommandError: the recording cannot be read, has no such step, or a path cannot be written.
    """
    steps = steps_in(_read(recording), number=number)
    if as_json:
        _print_json([_step_json(step) for step in steps])
    else:
        print_steps(steps)
    write_steps(steps, html, perfetto, to_stderr=as_json)


def why(
    recording: Path,
    *,
    live: Callable[[], Iterable[PartitionSummary]] | None = None,
    as_json: bool = False,
) -> None:
    """Print the open waits of a recording.

    If the recording has no record of the last five minutes, its program counts as ended, unless
    ``live`` is given: durations are up to the last record.

    Args:
        recording: path of the recording.
        live: function that returns the partitions of the running store, for exact counts of
            samples; None counts samples from the recording.
        as_json: whether to print JSON.

    Raises:
        CommandError: the recording cannot be read.
    """
    from observability import views
    from observability.views.quantities import duration

    records = _read(recording)
    now_ns, end_ns = time.time_ns(), _end_ns(records)
    has_ended = live is None and now_ns - end_ns > _ENDED_AFTER_S * 1e9
    waits = views.why(records, end_ns if has_ended else now_ns, None if live is None else live())
    if as_json:
        _print_json([_wait_json(wait) for wait in waits])
        return
    console = Console()
    views.print_view(views.waits_view(waits), console)
    if waits and has_ended:
        ago = duration((now_ns - end_ns) / 1e9)
        console.print(f"Durations are up to the last record, {ago} ago.", style="yellow")


def sample(
    sample_id: str, recording: Path, *, run_id: str | None = None, as_json: bool = False
) -> None:
    """Print the lineage of a sample in one run, and the other runs that have the sample id.

    Args:
        sample_id: id of the sample.
        recording: path of the recording.
        run_id: id of the run; None is the newest run that has the sample.
        as_json: whether to print JSON.

    Raises:
        CommandError: the recording cannot be read, or no event of the run names the sample.
    """
    from observability import views

    records = _read(recording)
    runs = views.runs_of_sample(sample_id, records)
    shown = next(iter(runs), "") if run_id is None else run_id
    if runs and shown not in runs:
        raise CommandError(
            f"no event of run {_quoted([shown])} names the sample; see runs {_quoted(runs)}"
        )
    try:
        lineage = views.lineage_of(sample_id, records, run_id=shown)
    except views.SampleNotFound as error:
        raise CommandError(str(error)) from None
    others = [other for other in runs if other != shown]
    if as_json:
        hops = [_event_json(event) for event in lineage]
        _print_json({"sample_id": sample_id, "run_id": shown, "other_runs": others, "hops": hops})
        return
    console = Console()
    views.print_view(views.lineage_view(sample_id, lineage), console)
    if others:
        line = f"Shown for run {_quoted([shown])}; --run shows {_quoted(others)}."
        console.print(Text(line, "yellow"))


def _quoted(runs: Sequence[str]) -> str:
    """Return the first runs, quoted, and the number of the others."""
    from observability.views import printable

    named = ", ".join(f"'{printable(run)}'" for run in runs[:_MAX_RUNS])
    return f"{named} and {len(runs) - _MAX_RUNS} more" if len(runs) > _MAX_RUNS else named


def steps_in(records: Records, *, number: int | None = None) -> list[Step]:
    """Return the steps in the records, or only those with the given number.

    Raises:
        CommandError: there is no such step.
    """
    from observability.views import steps_of

    steps = steps_of(records)
    if not steps:
        raise CommandError("no step was traced: no span has the attribute rl.step")
    selected = [step for step in steps if number in (None, step.number)]
    if not selected:
        numbers = [step.number for step in steps]
        raise CommandError(
            f"no step {number} in the recording, which has steps {min(numbers)} to {max(numbers)}"
        )
    return selected


def print_steps(steps: Sequence[Step]) -> None:
    """Print the waterfall and the tables of steps."""
    from observability.views import print_view, steps_view

    print_view(steps_view(steps), Console())


def write_steps(
    steps: Sequence[Step], html: Path | None, perfetto: Path | None, *, to_stderr: bool = False
) -> None:
    """Write steps as a page and as a file for Perfetto, and print the paths.

    Raises:
        CommandError: a file cannot be written.
    """
    from observability.views import write_page, write_perfetto

    console = Console(stderr=to_stderr)
    for path, write in ((html, write_page), (perfetto, write_perfetto)):
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                write(steps, path)
            except OSError as error:
                raise CommandError(f"{path}: cannot be written: {error}") from None
            console.print(Text.assemble("wrote  ", (str(path), "bold")), soft_wrap=True)


def reason_of(error: Exception) -> str:
    """Return the message of an error; for an `OSError`, its path and reason only."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _end_ns(records: Records) -> int:
    """Return the time of the last record, in nanoseconds since 1970; 0 without records."""
    events = (event.received_ns or event.time_ns for event in records.events)
    return max(chain(events, (span.end_ns for span in records.spans)), default=0)


def _read(recording: Path) -> Records:
    """Read a recording.

    Raises:
        RecordingError: the recording does not exist or is damaged.
    """
    from observability.recordings import read_recording

    try:
        return read_recording(recording)
    except (OSError, ValueError) as error:
        raise RecordingError(reason_of(error)) from None


@contextmanager
def _reported_errors() -> Iterator[None]:
    try:
        yield
    except CommandError as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(1) from None


def _print_json(value: Any) -> None:
    # Names from senders may hold lone surrogates, which only ASCII output can carry.
    typer.echo(json.dumps(value, ensure_ascii=True))


def _process_json(process: Process) -> dict[str, Any]:
    return {
        "service": process.service,
        "instance": process.instance,
        "host": process.host,
        "pid": process.pid,
    }


def _wait_json(wait: OpenWait) -> dict[str, Any]:
    return {
        "sentence": str(wait),
        **{each.name: getattr(wait, each.name) for each in fields(wait)},
        "process": _process_json(wait.process),
        "lacks": {name: asdict(lack) for name, lack in wait.lacks.items()},
        "holders": dict(wait.holders),
    }


def _event_json(event: LineageEvent) -> dict[str, Any]:
    facts = {each.name: getattr(event, each.name) for each in fields(event)}
    return {**facts, "process": _process_json(event.process)}


def _step_json(step: Step) -> dict[str, Any]:
    from observability.views import (
        bytes_by_stage,
        critical_path,
        process_times,
        slowest,
        waste,
    )

    wasted = waste(step)
    return {
        "run_id": step.run_id,
        "step": step.number,
        "trace_id": step.trace_id,
        "start_ns": step.start_ns,
        "seconds": step.seconds,
        "spans": len(step.spans),
        "incomplete": step.incomplete,
        "clocks_ahead_ns": dict(step.clock_offsets),
        "processes": [
            {
                "label": each.label,
                **_process_json(each.process),
                "seconds_by_bucket": dict(each.seconds),
                "busy_seconds": each.busy_seconds,
                "busy_in_other_traces_seconds": each.elsewhere_seconds,
                "bubble_seconds": each.bubble_seconds,
            }
            for each in process_times(step)
        ],
        "critical_path": [
            {
                "span": segment.span.name,
                "span_id": segment.span.span_id,
                "process": step.labels[segment.span.process],
                "start_s": (segment.start_ns - step.start_ns) / 1e9,
                "seconds": segment.seconds,
            }
            for segment in critical_path(step)
        ],
        "bytes_by_stage": [asdict(each) for each in bytes_by_stage(step)],
        "waste": {**asdict(wasted), "share": wasted.share, "seconds": wasted.seconds},
        "staleness": None if step.staleness is None else asdict(step.staleness),
        "slowest": [
            {
                "span": span.name,
                "span_id": span.span_id,
                "process": step.labels[span.process],
                "seconds": span.reported_seconds,
            }
            for span in slowest(step)
        ],
    }
