"""The command line ``grpo-trace``: where a GRPO step spends its time, across all its processes.

Without a subcommand it runs traced steps and shows them. The telemetry is stored in a folder, so
that ``show``, ``sample``, ``why`` and ``what-if`` also work afterwards, and from another terminal
during the run. The first three are the commands of ``python -m observability``. By default, all
four read the newest traced run.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any  # Any: values of options

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dataplane_core import DataPlaneError
from grpo_trainer.config.loading import DEMO_CONFIG, TrainerConfig, load_config
from grpo_trainer.errors import ConfigurationError, TrainerError
from grpo_trainer.options import (
    EXIT_STATUS,
    OptionsCommand,
    OptionsGroup,
    Overrides,
    version_option,
)
from grpo_trainer.report.terminal import TerminalDisplay, exit_on_user_error
from grpo_trainer.run.signals import GracefulStop
from observability import cli as views

if TYPE_CHECKING:
    from dataplane_core import PartitionSummary
    from grpo_trainer.what_if import Recording, Setting

TRACES = Path("runs") / "traces"


class _TraceGroup(OptionsGroup):
    def problems(self, given: Mapping[str, Any]) -> Iterator[str]:
        yield from _output_problems(given)
        try:
            load_config(given["config"], _overrides(given))
        except ConfigurationError as error:
            yield str(error)


class _WhatIfCommand(OptionsCommand):
    def problems(self, given: Mapping[str, Any]) -> Iterator[str]:
        generators = given.get("generators")
        if generators is not None and not re.fullmatch(r"[+-]?\d{1,6}", generators):
            yield f"--generators: found {generators!r}; expected a number such as 3, +2 or -1"


class _ShowCommand(OptionsCommand):
    def problems(self, given: Mapping[str, Any]) -> Iterator[str]:
        return _output_problems(given)


app = typer.Typer(
    cls=_TraceGroup,
    help="Trace GRPO steps end to end. Without a command: run steps and show them.\n\n"
    "Example: grpo-trace --steps 2 --html trace.html",
    epilog=EXIT_STATUS,
    pretty_exceptions_enable=False,
)

Folder = Annotated[
    Path | None,
    typer.Option(
        path_type=Path, help="Folder of a traced run; the newest below runs/traces if not given."
    ),
]


@app.callback(invoke_without_command=True)
def trace_command(
    context: typer.Context,
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="Steps to run.")] = 3,
    config: Annotated[
        Path, typer.Option(path_type=Path, help="YAML configuration.", show_default="the demo's")
    ] = DEMO_CONFIG,
    set_: Overrides = None,
    verbose: Annotated[
        bool, typer.Option(help="Record more spans: micro-batches, storage, phases of a refit.")
    ] = False,
    html: views.Html = None,
    perfetto: views.Perfetto = None,
    otlp: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Forward all telemetry to an OTLP/HTTP collector."),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            path_type=Path,
            help="Folder to store the trace in; a new one below runs/traces by default.",
        ),
    ] = None,
    show_version: Annotated[bool, version_option("grpo-trace")] = False,
) -> None:
    """Run traced steps and show where their time went."""
    if context.invoked_subcommand is not None:
        _refuse_options(context)
    else:
        target = folder or TRACES / datetime.now().strftime("%Y%m%d-%H%M%S")
        overrides = _overrides({"set_": set_, "steps": steps, "verbose": verbose})
        _guarded(lambda: _run(load_config(config, overrides), target, html, perfetto, otlp))


def _overrides(given: Mapping[str, Any]) -> list[str]:
    """Return the overrides of the configuration that the options of a run contain."""
    return [
        f"grpo.num_steps={given.get('steps', 1)}",
        "validation.every_steps=0",
        "checkpointing.every_steps=0",
        *(given.get("set_") or []),
        "tracing.enabled=true",
        f"tracing.verbose={str(given['verbose']).lower()}",
    ]


def _refuse_options(context: typer.Context) -> None:
    """Reject options of a run in front of a subcommand, where they would have no effect."""
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is not None and source.name == "COMMANDLINE":
            raise typer.BadParameter(
                f"{parameter.opts[0]} is before {context.invoked_subcommand!r}; put the options "
                "of a command after its name"
            )


def _output_problems(given: Mapping[str, Any]) -> Iterator[str]:
    """Yield problems of output options that would otherwise appear only after a run."""
    for option in ("html", "perfetto"):
        path = given.get(option)
        if path is not None and path.is_dir():
            yield f"--{option}: {path}: found a folder; expected a file"
        elif path is not None and not _can_be_written(path):
            yield f"--{option}: {path}: cannot be written"
    folder, otlp = given.get("folder"), given.get("otlp")
    if folder is not None and folder.exists() and not folder.is_dir():
        yield f"--folder: {folder}: found a file; expected a folder"
    if otlp is not None and not otlp.startswith(("http://", "https://")):
        yield f"--otlp: found {otlp!r}; expected a URL such as http://127.0.0.1:4318"


def _can_be_written(path: Path) -> bool:
    existing = next(each for each in (path, *path.absolute().parents) if each.exists())
    return os.access(existing, os.W_OK) and (existing == path or existing.is_dir())


@app.command("show", cls=_ShowCommand)
def show_command(
    folder: Folder = None,
    html: views.Html = None,
    perfetto: views.Perfetto = None,
    as_json: views.AsJson = False,
) -> None:
    """Show the waterfall, critical path and figures of each step.

    Example: grpo-trace show --html trace.html
    """
    _guarded(lambda: views.show(_newest(folder), html=html, perfetto=perfetto, as_json=as_json))


@app.command("sample", cls=OptionsCommand)
def sample_command(
    sample_id: Annotated[str, typer.Argument(metavar="ID", help="Id of the sample.")],
    folder: Folder = None,
    run: views.SampleRun = None,
    as_json: views.AsJson = False,
) -> None:
    """Show the lifecycle of one sample, from put to clear.

    Example: grpo-trace sample p0_g0
    """
    _guarded(lambda: views.sample(sample_id, _newest(folder), run_id=run, as_json=as_json))


@app.command("why", cls=OptionsCommand)
def why_command(
    folder: Folder = None,
    live: Annotated[
        bool, typer.Option(help="Query the data plane of the Ray cluster on this machine as well.")
    ] = False,
    as_json: views.AsJson = False,
) -> None:
    """List blocked tasks and what each is blocked on, longest first; silent processes last.

    Example: grpo-trace why --live
    """
    partitions = _live_partitions if live else None
    _guarded(lambda: views.why(_newest(folder), live=partitions, as_json=as_json))


@app.command("what-if", cls=_WhatIfCommand)
def what_if_command(
    generators: Annotated[
        str | None,
        typer.Option(metavar="N", help="Generators: a number, or a change such as +2 or -1."),
    ] = None,
    staleness: Annotated[
        int | None, typer.Option(min=0, help="Steps by which generators may run ahead.")
    ] = None,
    folder: Folder = None,
    as_json: views.AsJson = False,
) -> None:
    """Predict a run's step time with another number of generators or another staleness.

    Example: grpo-trace what-if --generators +2 --staleness 2
    """

    def predict() -> None:
        from grpo_trainer.what_if import Setting, recording_of
        from observability.recordings import read_recording

        try:
            records = read_recording(_newest(folder))
        except (OSError, ValueError) as error:
            raise views.RecordingError(views.reason_of(error)) from None
        recorded = recording_of(records)
        setting = recorded.setting
        count = setting.generators
        if generators is not None:
            count = int(generators) + (count if generators[0] in "+-" else 0)
        if count < 1:
            raise ConfigurationError(
                f"--generators: {generators} of {setting.generators} leaves {count}; expected 1 or "
                "more"
            )
        ahead = setting.staleness if staleness is None else staleness
        changed = Setting(count, setting.concurrent_rollouts, ahead)
        _print_prediction(recorded, changed, as_json=as_json)

    _guarded(predict)


def _print_prediction(recorded: Recording, changed: Setting, *, as_json: bool) -> None:
    rows = {
        "recorded": (recorded.setting, recorded.shares),
        "replayed": (recorded.setting, recorded.replayed()),
        "long run": (recorded.setting, recorded.with_setting(recorded.setting)),
        "what if": (changed, recorded.with_setting(changed)),
    }
    error = rows["replayed"][1].step_s / recorded.shares.step_s - 1
    if as_json:
        answer = {
            name.replace(" ", "_"): {**asdict(setting), **asdict(shares)}
            for name, (setting, shares) in rows.items()
        }
        typer.echo(json.dumps({**answer, "replay_error": error}, indent=2))
        return
    table = Table("", box=None)
    for heading in ("generators", "rollouts", "staleness", "step", "trainer idle"):
        table.add_column(heading, justify="right")
    table.add_column("generators idle", justify="right")
    for name, (setting, shares) in rows.items():
        counts = map(str, (setting.generators, setting.rollouts, setting.staleness))
        idle = (f"{share:.0%}" for share in (shares.trainer_idle, shares.generators_idle))
        table.add_row(name, *counts, f"{shares.step_s:.2f} s", *idle)
    console = Console()
    console.print(table)
    console.print(f"The replayed step differs from the recorded one by {error:+.1%}.")


def _guarded(action: Callable[[], None]) -> None:
    with exit_on_user_error(), GracefulStop().on_sigterm():
        try:
            action()
        except views.RecordingError as error:
            raise TrainerError(f"--folder: {error}") from None
        except views.CommandError as error:
            raise TrainerError(str(error)) from None


def _run(
    config: TrainerConfig, target: Path, html: Path | None, perfetto: Path | None, otlp: str | None
) -> None:
    from grpo_trainer.run.runs import train
    from observability.receiver import BrokenRecording, Receiver

    console = Console()
    display = TerminalDisplay(console)
    # See `grpo_trainer.cli`: read when Ray is imported.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    try:
        target.mkdir(parents=True, exist_ok=True)
        receiver = Receiver(target, forward=otlp)
    except (OSError, BrokenRecording) as error:
        raise ConfigurationError(f"--folder: {views.reason_of(error)}") from None
    except ValueError as error:
        raise ConfigurationError(f"--otlp: {error}") from None
    with receiver:
        traced = config.tracing.model_copy(update={"endpoint": receiver.endpoint})
        try:
            train(config.model_copy(update={"tracing": traced}), display=display)
        except (TrainerError, DataPlaneError):
            display.close()
            # The last step shows where the run failed; without a step only the error is printed.
            with suppress(views.CommandError):
                steps = views.steps_in(receiver.snapshot())
                views.print_steps(steps[-1:])
                views.write_steps(steps, html, perfetto)
            raise
        finally:
            display.close()
        steps = views.steps_in(receiver.snapshot())
        views.print_steps(steps)
        views.write_steps(steps, html, perfetto)
        console.print(Text.assemble("trace  ", (str(target), "bold")), soft_wrap=True)
    if lost := receiver.counts()["not_forwarded"]:
        console.print(Text(f"{lost} export requests did not reach {otlp}", style="yellow"))


def _live_partitions() -> list[PartitionSummary]:
    import ray

    from dataplane_core import build_data_plane_client
    from dataplane_tq import join_ray

    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    try:
        join_ray("auto", namespace="grpo-trace", logging_level="ERROR", log_to_driver=False)
    except (RuntimeError, OSError) as error:
        raise TrainerError(f"--live: no Ray cluster on this machine: {error}") from None
    try:
        plane = {"enabled": True, "impl": "transfer_queue"}
        with build_data_plane_client(plane, bootstrap=False) as client:
            return client.inspector.list_partitions()
    finally:
        ray.shutdown()


def _newest(folder: Path | None) -> Path:
    """Return ``folder``, or the folder of the newest traced run."""
    if folder is not None:
        return folder
    runs = [path for path in TRACES.glob("*") if path.is_dir()]
    if not runs:
        raise TrainerError(f"no traced run below {TRACES}; run `grpo-trace`, or set --folder")
    return max(runs, key=lambda path: path.stat().st_mtime)
