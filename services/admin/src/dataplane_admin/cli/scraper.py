"""Command ``scrape``."""

from __future__ import annotations

from typing import Annotated

import typer

from dataplane_admin.checks import read_token
from dataplane_admin.cli.options import checked
from dataplane_admin.cli.shared import DEFAULT_URL, TokenFile, log_to_standard_error, refuse
from dataplane_admin.serving import exit_cleanly_on_signals


def _check_engine(url: str) -> None:
    from dataplane_admin.scrape import engine_name

    engine_name(url, "")


def scrape(
    engine: Annotated[
        list[str] | None,
        typer.Option(
            help="URL of the metrics of vLLM or SGLang. Can be repeated.",
            callback=checked(_check_engine),
        ),
    ] = None,
    node: Annotated[
        bool, typer.Option("--node", help="Also report processors, memory and GPUs of this node.")
    ] = False,
    to: Annotated[
        str, typer.Option(help="URL of the service.", envvar="DATAPLANE_ADMIN_URL")
    ] = DEFAULT_URL,
    token_file: TokenFile = None,
    run: Annotated[
        str, typer.Option(help="Run that engines and node serve; by default all runs.")
    ] = "",
    interval_s: Annotated[
        float, typer.Option(min=1, max=3600, help="Seconds between two scrapes.")
    ] = 5.0,
) -> None:
    """Send the load of engines and of this node to the service. Runs until SIGTERM or SIGINT.

    Example: dataplane-admin scrape --engine http://127.0.0.1:8000/metrics --node
    """
    if not engine and not node:
        refuse("nothing to scrape; expected --engine, --node or both", status=2)
    try:
        from dataplane_admin.scrape import scrape as send_load
    except ModuleNotFoundError as error:
        refuse(f"{error.name} is not installed; install dataplane-admin with its extra 'scrape'")
    exit_cleanly_on_signals()
    log_to_standard_error()
    token = None if token_file is None else read_token(token_file)
    send_load(engine or [], node=node, to=to, token=token, run_id=run, interval_s=interval_s)
