"""Command ``dataplane-admin``: starts the service, and queries a running one."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from dataplane_admin.cli.options import OptionsCommand, OptionsGroup
from dataplane_admin.cli.queries import alerts, partitions, runs, sample, tag, trace, traces, why
from dataplane_admin.cli.scraper import scrape
from dataplane_admin.cli.service import serve

_VARIABLES = (
    "Each option of a command has an environment variable: for --port of serve it is "
    "DATAPLANE_ADMIN_SERVE_PORT. Exceptions: DATAPLANE_ADMIN_DB of serve; DATAPLANE_ADMIN_URL and "
    "DATAPLANE_ADMIN_TOKEN_FILE of all other commands."
)

app = typer.Typer(
    cls=OptionsGroup,
    help="Serve the dashboard of a data plane and its traces, or query a running service.\n\n"
    "Example: dataplane-admin serve --ray-address auto",
    epilog="Exit status: 0 on success, 1 on failure, 2 for a wrong option or command. "
    f"{_VARIABLES}",
    no_args_is_help=True,
    context_settings={"auto_envvar_prefix": "DATAPLANE_ADMIN"},
    # A traceback with local variables would show the token.
    pretty_exceptions_enable=False,
)

for _command in (serve, partitions, sample, traces, trace, why, alerts, runs, tag, scrape):
    app.command(cls=OptionsCommand, epilog=_VARIABLES)(_command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dataplane-admin {version('dataplane-admin')}")
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            allow_from_autoenv=False,
            help="Print the version and exit.",
        ),
    ] = False,
) -> None:
    pass
