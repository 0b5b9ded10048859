"""Command ``dataplane-admin``: starts the service, and queries a running one."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from dataplane_admin.cli.options import OptionsCommand
from dataplane_admin.cli.queries import alerts, partitions, runs, sample, tag, trace, traces, why
from dataplane_admin.cli.scraper import scrape
from dataplane_admin.cli.service import serve

app = typer.Typer(
    help="Serve the dashboard of a data plane and its traces, or query a running service.",
    epilog="Example: dataplane-admin serve --ray-address auto. Exit status: 0 on success, 1 after "
    "an error, 2 for an unknown option. Each option has an environment variable: for --port of "
    "serve it is DATAPLANE_ADMIN_SERVE_PORT.",
    no_args_is_help=True,
    context_settings={"auto_envvar_prefix": "DATAPLANE_ADMIN"},
    # A traceback with local variables would show the token.
    pretty_exceptions_enable=False,
)

_EXAMPLES = (
    (serve, "serve --db admin.sqlite --ray-address auto"),
    (partitions, "partitions --json"),
    (sample, "sample s39_p0_g0"),
    (traces, "traces --run demo --error --limit 5"),
    (trace, "trace c7ebe4297c782f035b3debe31eac3a22"),
    (why, "why --run demo"),
    (alerts, "alerts --json"),
    (runs, "runs --state failed --sort started"),
    (tag, "tag demo/20261127-120000 good"),
    (scrape, "scrape --engine http://127.0.0.1:8000/metrics --node"),
)
for _command, _example in _EXAMPLES:
    app.command(cls=OptionsCommand, epilog=f"Example: dataplane-admin {_example}")(_command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dataplane-admin {version('dataplane-admin')}")
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass
