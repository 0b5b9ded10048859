"""The command ``refit-server``."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Annotated, NoReturn

import typer

# What a command needs is imported by it: a probe that asks for health every few seconds is not to
# load a server.

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
            "Not loopback: needs --tls-cert, --tls-key and --token-file."
        ),
    ] = "127.0.0.1:50051",
    tls_cert: Annotated[
        Path | None, typer.Option(help="PEM file with the server's certificate chain.")
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(help="PEM file with the certificate's private key.")
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(help="File with the token that calls bring as `authorization: Bearer`."),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(
            help="SQLite file of versions, workers, shards and leases; made if it is not there. "
            "Without it a restart forgets them."
        ),
    ] = None,
    retention: Annotated[
        int, typer.Option(min=0, help="READY versions that each model keeps; 0 keeps all.")
    ] = 2,
    forget_after_s: Annotated[
        float,
        typer.Option(min=1, help="Seconds until a released version without shards is forgotten."),
    ] = 3600.0,
    most_ttl_s: Annotated[
        float, typer.Option(min=1, help="Longest time to live that workers and leases may ask for.")
    ] = 86_400.0,
    restart_grace_s: Annotated[
        float,
        typer.Option(
            min=0,
            help="Seconds after a start or a pause for which workers and leases that were live "
            "stay so; their own time to live if that is shorter.",
        ),
    ] = 30.0,
    metrics_port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Port of Prometheus metrics; 0 takes a free one."),
    ] = None,
    metrics_host: Annotated[
        str, typer.Option(help="Numeric address that metrics are shown on; they need no token.")
    ] = "127.0.0.1",
    grace_s: Annotated[
        float, typer.Option(min=0, help="Seconds that a stop may take after SIGTERM.")
    ] = 10.0,
) -> None:
    """Serve until SIGTERM or SIGINT.

    The one line of output is the bound address; that of the metrics goes to standard error.
    """
    # gRPC, when it is imported, reads it; else it logs a line for each TLS handshake that fails.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")

    from refit_mx.control.auth import read_token
    from refit_server.address import Address
    from refit_server.server import BindError, Keeping, MetricsAddress, StateError
    from refit_server.server import serve as serve_until_signal
    from refit_server.tls import TlsFiles

    if (tls_cert is None) != (tls_key is None):
        _refuse("--tls-cert and --tls-key: found one; expected both or neither")
    tls = TlsFiles(tls_cert, tls_key) if tls_cert is not None and tls_key is not None else None
    try:
        asyncio.run(
            serve_until_signal(
                Address.parse(address),
                tls=tls,
                token=read_token(token_file) if token_file is not None else None,
                keeping=Keeping(
                    state=state,
                    retention=retention,
                    forget_after_s=forget_after_s,
                    most_ttl_s=most_ttl_s,
                    restart_grace_s=restart_grace_s,
                ),
                metrics=MetricsAddress(metrics_host, metrics_port)
                if metrics_port is not None
                else None,
                grace_s=grace_s,
                on_ready=typer.echo,
                on_metrics=lambda url: typer.echo(f"refit-server: metrics at {url}", err=True),
            )
        )
    except (BindError, StateError, ValueError) as error:
        _refuse(str(error))


@app.command()
def check(
    address: Annotated[str, typer.Option(help="HOST:PORT of the server.")] = "127.0.0.1:50051",
    tls_ca: Annotated[
        Path | None, typer.Option(help="PEM file of the certificates to trust.")
    ] = None,
    tls_name: Annotated[
        str | None, typer.Option(help="Name that the server's certificate has to be of.")
    ] = None,
    timeout_s: Annotated[float, typer.Option(min=0.01, help="Seconds to wait.")] = 5.0,
) -> None:
    """Ask a server whether it serves: exit status 0 if it does, 1 if not."""
    from refit_server.check import CheckError
    from refit_server.check import check as check_health

    try:
        check_health(address, tls_ca=tls_ca, tls_name=tls_name, timeout_s=timeout_s)
    except CheckError as error:
        _refuse(str(error))


def _refuse(reason: str) -> NoReturn:
    typer.echo(f"refit-server: {reason}", err=True)
    raise typer.Exit(1)
