"""The command line: ``grpo-trainer train``, ``resume`` and ``schema``.

Every failure that a user can cause or fix ends with one message on standard error and exit status
1; a wrong option or configuration ends with status 2. Ray is shut down before the process exits,
even after an interrupt or SIGTERM. After a first SIGTERM, the current step finishes, a checkpoint
is written unless checkpoints are disabled, and the exit status is 0. A SIGTERM before the first
step, or a second one, stops the run at once with status 143.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any  # Any: values of options

import typer
from rich.console import Console

from grpo_trainer.checkpoint.folder import latest_checkpoint
from grpo_trainer.config.json_schema import configuration_schema
from grpo_trainer.config.loading import DEMO_CONFIG, load_config
from grpo_trainer.errors import ConfigurationError
from grpo_trainer.options import EXIT_STATUS, AsJson, OptionsCommand, Overrides, version_option
from grpo_trainer.report.terminal import (
    TerminalDisplay,
    exit_on_user_error,
    print_summary,
    summary_of,
)
from grpo_trainer.run.folder import CHECKPOINTS, PICTURE
from grpo_trainer.run.runs import RunResult, resume, train
from grpo_trainer.run.signals import GracefulStop

app = typer.Typer(
    help="Train a language model with GRPO on Ray, through a data plane.\n\n"
    "Example: grpo-trainer train --set grpo.num_steps=10 --output runs",
    epilog=EXIT_STATUS,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.callback()
def _options(show_version: Annotated[bool, version_option("grpo-trainer")] = False) -> None:
    pass


class _TrainCommand(OptionsCommand):
    def problems(self, given: Mapping[str, Any]) -> Iterator[str]:
        try:
            load_config(given["config"], _overrides(given))
        except ConfigurationError as error:
            yield str(error)


@app.command("train", cls=_TrainCommand)
def train_command(
    config: Annotated[
        Path, typer.Option(path_type=Path, help="YAML configuration.", show_default="the demo")
    ] = DEMO_CONFIG,
    dataset: Annotated[
        Path | None, typer.Option(path_type=Path, help="JSONL prompts; overrides data.train.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(path_type=Path, help="Folder for runs; overrides run.output.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Overrides run.seed.")] = None,
    set_: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Start a run; without options, the demo.

    Example: grpo-trainer train --config my.yaml --dataset prompts.jsonl --seed 1
    """
    given = {"set_": set_, "dataset": dataset, "output": output, "seed": seed}
    overrides = _overrides(given)
    _report(
        lambda display, stop: train(load_config(config, overrides), display=display, stop=stop),
        as_json=as_json,
    )


def _overrides(given: Mapping[str, Any]) -> list[str]:
    """Return the overrides of the configuration that the options contain."""
    overrides = list(given.get("set_") or [])
    for name, key in (("dataset", "data.train"), ("output", "run.output"), ("seed", "run.seed")):
        if given.get(name) is not None:
            # A JSON string is valid YAML. Without its quotes, a path may be read as another type.
            overrides.append(f"{key}={json.dumps(given[name], default=str)}")
    return overrides


@app.command("resume", cls=OptionsCommand)
def resume_command(
    folder: Annotated[Path, typer.Argument(path_type=Path, help="The run's folder.")],
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Override a key that does not change results, such as "
            "cluster.call_timeout_s=600, or grpo.num_steps.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Continue a run from its newest checkpoint.

    Example: grpo-trainer resume runs/demo/20260101-120000 --set grpo.num_steps=20
    """
    _report(
        lambda display, stop: resume(folder, set_ or [], display=display, stop=stop),
        as_json=as_json,
    )


@app.command("schema")
def schema_command() -> None:
    """Print the JSON schema of the configuration, for an editor's checks and completion.

    Example: grpo-trainer schema > grpo-trainer.schema.json
    """
    typer.echo(json.dumps(configuration_schema(), indent=2))


def _report(run: Callable[[TerminalDisplay, GracefulStop], RunResult], *, as_json: bool) -> None:
    stop = GracefulStop()
    # Under `uv run`, Ray would start every worker by `uv run` too, in a copy of the working folder
    # that lacks what git ignores. Ray reads this variable when it is imported, which happens later.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    console = Console(stderr=as_json)
    display = TerminalDisplay(console)
    with exit_on_user_error(display.close), stop.on_sigterm():
        result = run(display, stop)
    checkpoint = latest_checkpoint(result.folder / CHECKPOINTS)
    picture = result.folder / PICTURE
    if result.was_stopped:
        advice = f"to continue: grpo-trainer resume {result.folder}"
        if checkpoint is None:
            advice = "no checkpoint was written"
        console.print(f"stopped after step {len(result.history)}; {advice}", soft_wrap=True)
    if as_json:
        summary = {
            "folder": str(result.folder),
            "checkpoint": None if checkpoint is None else str(checkpoint),
            "picture": str(picture),
            "steps": len(result.history),
            "was_stopped": result.was_stopped,
            **asdict(summary_of(result.history)),
        }
        typer.echo(json.dumps(summary))
    else:
        print_summary(console, result.history, picture=picture)
