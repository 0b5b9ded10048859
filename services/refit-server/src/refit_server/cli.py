"""The command ``refit-server``."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from refit_server.address import Address
from refit_server.server import BindError
from refit_server.server import serve as serve_until_signal
from refit_server.tls import TlsFiles

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def main() -> None:
    """Deployable control plane for weight refit."""


@app.command()
def serve(
    address: Annotated[
        str,
        typer.Option(
            help="HOST:PORT to listen on; port 0 takes a free one. "
            "Not loopback: needs --tls-cert and --tls-key."
        ),
    ] = "127.0.0.1:50051",
    tls_cert: Annotated[
        Path | None, typer.Option(help="PEM file with the server's certificate chain.")
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(help="PEM file with the certificate's private key.")
    ] = None,
    grace_s: Annotated[
        float, typer.Option(min=0, help="Seconds that a stop may take after SIGTERM.")
    ] = 10.0,
) -> None:
    """Serve until SIGTERM or SIGINT. The one line of output is the bound address."""
    if (tls_cert is None) != (tls_key is None):
        _refuse("--tls-cert and --tls-key: found one; expected both or neither")
    tls = TlsFiles(tls_cert, tls_key) if tls_cert is not None and tls_key is not None else None
    try:
        asyncio.run(
            serve_until_signal(
                Address.parse(address), tls=tls, grace_s=grace_s, on_ready=typer.echo
            )
        )
    except (BindError, ValueError) as error:
        _refuse(str(error))


def _refuse(reason: str) -> NoReturn:
    typer.echo(f"refit-server: {reason}", err=True)
    raise typer.Exit(1)
