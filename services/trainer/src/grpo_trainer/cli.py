"""The command line: ``grpo-trainer train`` and ``grpo-trainer resume``.

Every failure that a user can cause or fix ends as one message on standard error and exit status 1;
Ray is shut down first, also when the process is interrupted or terminated. The first SIGTERM lets
the step under way end and be checkpointed, with exit status 0; a second one ends the run at once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from dataplane_core import DataPlaneError
from grpo_trainer.checkpoint import latest_checkpoint
from grpo_trainer.config import DEMO_CONFIG, load_config
from grpo_trainer.display import TerminalDisplay, print_summary
from grpo_trainer.errors import TrainerError
from grpo_trainer.run import RunResult, resume, train
from grpo_trainer.run_folder import CHECKPOINTS, PICTURE
from grpo_trainer.signals import GracefulStop

app = typer.Typer(
    help="Synchronous GRPO on Ray, through a data plane.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command("train")
def train_command(
    config: Annotated[Path, typer.Option(help="YAML configuration.")] = DEMO_CONFIG,
    dataset: Annotated[
        Path | None, typer.Option(help="JSONL prompts, instead of data.train.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder for runs, instead of run.output.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Instead of run.seed.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change one key, as grpo.num_steps=10."),
    ] = None,
) -> None:
    """Train from the start. Without options: the demo."""
    overrides = list(set_ or [])
    if dataset is not None:
        overrides.append(f"data.train={_quoted(dataset)}")
    if output is not None:
        overrides.append(f"run.output={_quoted(output)}")
    if seed is not None:
        overrides.append(f"run.seed={seed}")
    _report(lambda display, stop: train(load_config(config, overrides), display=display, stop=stop))


@app.command("resume")
def resume_command(
    folder: Annotated[Path, typer.Argument(help="The run's folder.")],
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change one key that does not change what is computed, as "
            "cluster.call_timeout_s=600, or grpo.num_steps.",
        ),
    ] = None,
) -> None:
    """Go on from the newest checkpoint of a run."""
    _report(lambda display, stop: resume(folder, set_ or [], display=display, stop=stop))


def _quoted(path: Path) -> str:
    return json.dumps(str(path))  # a JSON string is a YAML one; a bare path may be anything


def _report(run: Callable[[TerminalDisplay, GracefulStop], RunResult]) -> None:
    stop = GracefulStop()
    # Started by `uv run`, Ray would start every worker by `uv run` too, in a copy of the working
    # folder that lacks what git ignores. Read when Ray is imported, which it is not yet.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    console = Console()
    display = TerminalDisplay(console)
    try:
        with stop.on_sigterm():
            result = run(display, stop)
    except (TrainerError, DataPlaneError) as error:
        display.close()
        message = Text.assemble(("error: ", "bold red"), str(error))
        Console(stderr=True).print(message, soft_wrap=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        display.close()
        Console(stderr=True).print("interrupted")
        raise typer.Exit(130) from None
    finally:
        display.close()
    if result.stopped_early:
        done = f"stopped after step {len(result.history)}"
        checkpoint = latest_checkpoint(result.folder / CHECKPOINTS)
        told = (
            "without a checkpoint"
            if checkpoint is None
            else f"to go on: grpo-trainer resume {result.folder}"
        )
        console.print(f"{done}; {told}", soft_wrap=True)
    print_summary(console, result.history, picture=result.folder / PICTURE)
