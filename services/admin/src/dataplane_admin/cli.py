"""The command ``dataplane-admin``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NoReturn

import typer

from dataplane_admin.app import create_app
from dataplane_admin.host import LOOPBACK_HOSTS
from dataplane_admin.listen import listen, resolve
from dataplane_admin.server import end_in_peace_on_signals, run
from dataplane_admin.token import read_token

# A traceback with local variables would show the token.
app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def main() -> None:
    """The admin service of a data plane."""


@app.command()
def serve(
    host: Annotated[
        str, typer.Option(help="Address to listen on. Not loopback: needs --token-file.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")
    ] = 8080,
    token_file: Annotated[
        Path | None,
        typer.Option(help="File with the bearer token that every route but /healthz asks for."),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Further host that the Host header may name, without a port. Can be repeated."
        ),
    ] = None,
    shutdown_timeout_s: Annotated[
        int, typer.Option(min=1, help="Seconds that requests have to finish after SIGTERM.")
    ] = 10,
) -> None:
    """Serve until SIGTERM or SIGINT. The one line of output is the URL."""
    end_in_peace_on_signals()
    try:
        token = None if token_file is None else read_token(token_file)
    except (OSError, ValueError) as error:
        _refuse(str(error))
    try:
        asked = resolve(host, port)
    except OSError as error:
        _refuse(f"cannot listen on {host!r}: {error.strerror}")
    if token is None and not asked.is_loopback:
        _refuse(
            f"{host!r} is reachable from other machines; give --token-file, or a loopback address"
        )
    try:
        service = create_app(
            token=token,
            allowed_hosts=[*LOOPBACK_HOSTS, *asked.hosts, *(allowed_host or [])],
        )
    except ValueError as error:
        _refuse(f"--allowed-host: {error}")
    try:
        listener, bound = listen(asked)
    except OSError as error:
        _refuse(f"cannot listen on {asked}: {error.strerror}")
    typer.echo(f"http://{bound}")
    run(service, listener, shutdown_timeout_s=shutdown_timeout_s)


def _refuse(reason: str) -> NoReturn:
    typer.echo(f"dataplane-admin: {reason}", err=True)
    raise typer.Exit(1)
