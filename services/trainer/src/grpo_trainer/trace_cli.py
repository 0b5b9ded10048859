"""The command line ``grpo-trace``: where a GRPO step spends its time, across all its processes.

Without a subcommand it runs traced steps and shows them. What the processes told is kept in a
folder, so that ``show``, ``sample`` and ``why`` also work afterwards, and from another terminal
while the run goes on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from dataplane_core import DataPlaneError
from grpo_trainer.config import DEMO_CONFIG, TrainerConfig, load_config
from grpo_trainer.display import TerminalDisplay
from grpo_trainer.errors import ConfigurationError, TrainerError
from grpo_trainer.signals import GracefulStop

if TYPE_CHECKING:
    from dataplane_core import PartitionSummary
    from observability.records import Records

TRACES = Path("runs") / "traces"

app = typer.Typer(
    help="Trace GRPO steps end to end. Without a command: run steps and show them.",
    add_completion=False,
    pretty_exceptions_enable=False,
)

Folder = Annotated[
    Path | None,
    typer.Option(help="Folder of a traced run; the newest below runs/traces if not given."),
]
Html = Annotated[Path | None, typer.Option(help="Write the steps as one self-contained page.")]
Perfetto = Annotated[Path | None, typer.Option(help="Write a trace that ui.perfetto.dev opens.")]


@app.callback(invoke_without_command=True)
def trace_command(
    context: typer.Context,
    steps: Annotated[int, typer.Option(min=1, help="Steps to run.")] = 3,
    config: Annotated[
        Path, typer.Option(help="YAML configuration.", show_default="the demo's")
    ] = DEMO_CONFIG,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change one key, as grpo.num_steps=10."),
    ] = None,
    verbose: Annotated[bool, typer.Option(help="A span for each micro-batch as well.")] = False,
    html: Html = None,
    perfetto: Perfetto = None,
    otlp: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Send everything to an OTLP/HTTP collector as well."),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(help="Where to keep it; a new folder below runs/traces if not given."),
    ] = None,
) -> None:
    """Run traced steps and show where their time went."""
    if context.invoked_subcommand is not None:
        _refuse_options(context)
    else:
        _refuse_wrong_options(html=html, perfetto=perfetto, folder=folder, otlp=otlp)
        kept = folder or TRACES / datetime.now().strftime("%Y%m%d-%H%M%S")
        overrides = [
            f"grpo.num_steps={steps}",
            "validation.every_steps=0",
            "checkpointing.every_steps=0",
            *(set_ or []),
            "tracing.enabled=true",
            f"tracing.verbose={str(verbose).lower()}",
        ]
        _guarded(lambda: _run(load_config(config, overrides), kept, html, perfetto, otlp))


def _refuse_options(context: typer.Context) -> None:
    """Options of a run before another command would do nothing."""
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is not None and source.name == "COMMANDLINE":
            raise typer.BadParameter(
                f"{parameter.opts[0]} stands before {context.invoked_subcommand!r}; options of a "
                "command follow its name"
            )


def _refuse_wrong_options(
    *, html: Path | None, perfetto: Path | None, folder: Path | None = None, otlp: str | None = None
) -> None:
    """Refuse before a run what would fail after it, everything at once."""
    wrong = []
    for option, path in (("--html", html), ("--perfetto", perfetto)):
        if path is not None and path.is_dir():
            wrong.append(f"{option}: {path}: found a folder; expected a file")
        elif path is not None and not _can_be_written(path):
            wrong.append(f"{option}: {path}: cannot be written")
    if folder is not None and folder.exists() and not folder.is_dir():
        wrong.append(f"--folder: {folder}: found a file; expected a folder")
    if otlp is not None and not otlp.startswith(("http://", "https://")):
        wrong.append(f"--otlp: found {otlp!r}; expected one such as http://127.0.0.1:4318")
    if wrong:
        for line in wrong:
            typer.echo(f"error: {line}", err=True)
        raise typer.Exit(1)


def _can_be_written(path: Path) -> bool:
    existing = next(one for one in (path, *path.absolute().parents) if one.exists())
    return os.access(existing, os.W_OK) and (existing == path or existing.is_dir())


@app.command("show")
def show_command(folder: Folder = None, html: Html = None, perfetto: Perfetto = None) -> None:
    """Show the steps of a traced run."""
    _refuse_wrong_options(html=html, perfetto=perfetto)
    _guarded(lambda: _show(_read(folder), html, perfetto))


@app.command("sample")
def sample_command(
    sample_id: Annotated[str, typer.Argument(help="The sample's id.")], folder: Folder = None
) -> None:
    """Show one sample's life: which process did what with it, and when."""
    _guarded(lambda: _sample(sample_id, _read(folder)))


@app.command("why")
def why_command(
    folder: Folder = None,
    live: Annotated[
        bool, typer.Option(help="Ask the data plane of the Ray cluster on this machine as well.")
    ] = False,
) -> None:
    """Show what each waiting task waits for, since when, and what is missing."""
    _guarded(lambda: _why(_read(folder), live=live))


def _guarded(action: Callable[[], None]) -> None:
    """Every failure that a user can cause or fix is one message and exit status 1."""
    try:
        with GracefulStop().on_sigterm():
            action()
    except (TrainerError, DataPlaneError) as error:
        message = Text.assemble(("error: ", "bold red"), str(error))
        Console(stderr=True).print(message, soft_wrap=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted")
        raise typer.Exit(130) from None


def _run(
    config: TrainerConfig, kept: Path, html: Path | None, perfetto: Path | None, otlp: str | None
) -> None:
    from grpo_trainer.run import train
    from observability.receiver import BrokenRecording, Receiver

    console = Console()
    display = TerminalDisplay(console)
    # See `grpo_trainer.cli`: read when Ray is imported.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    try:
        kept.mkdir(parents=True, exist_ok=True)
        receiver = Receiver(kept, forward=otlp)
    except (OSError, BrokenRecording) as error:
        raise ConfigurationError(f"--folder: {_reason(error)}") from None
    except ValueError as error:
        raise ConfigurationError(f"--otlp: {error}") from None
    with receiver:
        traced = config.tracing.model_copy(update={"endpoint": receiver.endpoint})
        try:
            train(config.model_copy(update={"tracing": traced}), display=display)
        except (TrainerError, DataPlaneError):
            display.close()
            if receiver.snapshot().spans:  # they say where it failed
                _show(receiver.snapshot(), html, perfetto, last=True)
            raise
        except BaseException:
            display.close()
            raise
        display.close()
        _show(receiver.snapshot(), html, perfetto)
        console.print(Text.assemble("trace  ", (str(kept), "bold")), soft_wrap=True)
    if lost := receiver.counts()["not_forwarded"]:
        console.print(Text(f"{lost} export requests did not reach {otlp}", style="yellow"))


def _show(
    records: Records, html: Path | None, perfetto: Path | None, *, last: bool = False
) -> None:
    """Print the steps, the last one only if asked, and write all of them."""
    from observability.views import (
        print_view,
        steps_of,
        steps_view,
        write_page,
        write_perfetto,
    )

    steps = steps_of(records)
    console = Console()
    if not steps:
        raise ConfigurationError("no step was traced")
    print_view(steps_view(steps[-1:] if last else steps), console)
    for path, write in ((html, write_page), (perfetto, write_perfetto)):
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                write(steps, path)
            except OSError as error:
                raise ConfigurationError(f"{path}: cannot be written: {error}") from None
            console.print(Text.assemble("wrote  ", (str(path), "bold")), soft_wrap=True)


def _sample(sample_id: str, records: Records) -> None:
    from observability.views import SampleNotFound, life_of, lineage_view, print_view

    try:
        hops = life_of(sample_id, records)
    except SampleNotFound as error:
        raise ConfigurationError(str(error)) from None
    print_view(lineage_view(sample_id, hops), Console())


def _why(records: Records, *, live: bool) -> None:
    from observability.views import print_view, waits_view, why

    summaries = _live_partitions() if live else None
    print_view(waits_view(why(records, time.time_ns(), summaries)), Console())


def _live_partitions() -> list[PartitionSummary]:
    import ray

    from dataplane_core import build_data_plane_client
    from dataplane_tq import join_ray

    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    try:
        join_ray("auto", namespace="grpo-trace", logging_level="ERROR", log_to_driver=False)
    except (RuntimeError, OSError) as error:
        raise ConfigurationError(f"--live: no Ray cluster on this machine: {error}") from None
    try:
        # An attached client sizes nothing: what the running store is made of is its own affair.
        plane = load_config(DEMO_CONFIG).data_plane
        with build_data_plane_client(plane, bootstrap=False) as client:
            return client.list_partitions()
    finally:
        ray.shutdown()


def _read(folder: Path | None) -> Records:
    from observability.receiver import read_folder

    if folder is None:
        found = sorted((path for path in TRACES.glob("*") if path.is_dir()), key=_modified)
        if not found:
            raise ConfigurationError(
                f"no traced run below {TRACES}; run `grpo-trace`, or give --folder"
            )
        folder = found[-1]
    try:
        return read_folder(folder)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"--folder: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _modified(path: Path) -> float:
    return path.stat().st_mtime


if __name__ == "__main__":
    app()
