"""The command ``refit-server``."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from json import dumps
from pathlib import Path
from typing import Annotated, Any, NoReturn  # Any: values of options

import typer

from refit_server.options import OptionsCommand, OptionsGroup

# Commands import what they need: a probe that runs every few seconds must not load a server.

_MAX_S = 1e9

_VARIABLES = (
    "Each option of a command has an environment variable: for --address of serve it is "
    "REFIT_SERVER_SERVE_ADDRESS."
)

app = typer.Typer(
    cls=OptionsGroup,
    help="Run the control plane for weight refit, or check its health.\n\n"
    "Example: refit-server serve --address 127.0.0.1:50051 --state refit.db",
    epilog="Exit status: 0 on success, 1 on failure, 2 for a wrong option or command. "
    f"{_VARIABLES}",
    no_args_is_help=True,
    context_settings={"auto_envvar_prefix": "REFIT_SERVER"},
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"refit-server {version('refit-server')}")
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


class _ServeCommand(OptionsCommand):
    def problems(self, values: Mapping[str, Any]) -> Iterator[str]:
        # gRPC reads GRPC_VERBOSITY at import. Without NONE, it logs a line for each failed TLS
        # handshake.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")

        from refit_mx import RefitConfigError
        from refit_mx.control.auth import read_token
        from refit_server.address import Address
        from refit_server.tls import TlsFiles

        cert, key = values["tls_cert"], values["tls_key"]
        try:
            Address.parse(values["address"]).check_access(
                has_tls=cert is not None or key is not None,
                has_token=values["token_file"] is not None,
            )
        except ValueError as error:
            yield f"--address: {error}"
        if (cert is None) != (key is None):
            yield "--tls-cert and --tls-key: one is given; expected both or neither"
        elif cert is not None:
            try:
                TlsFiles(cert, key).credentials()
            except ValueError as error:
                yield f"--tls-cert and --tls-key: {error}"
        try:
            if values["token_file"] is not None:
                read_token(values["token_file"])
        except RefitConfigError as error:
            yield f"--token-file: {error}"


@app.command(cls=_ServeCommand, epilog=_VARIABLES)
def serve(
    address: Annotated[
        str,
        typer.Option(
            help="HOST:PORT to listen on; port 0 picks a free one. "
            "Any address but loopback needs --tls-cert, --tls-key and --token-file."
        ),
    ] = "127.0.0.1:50051",
    tls_cert: Annotated[
        Path | None,
        typer.Option(path_type=Path, help="PEM file with the server's certificate chain."),
    ] = None,
    tls_key: Annotated[
        Path | None,
        typer.Option(path_type=Path, help="PEM file with the certificate's private key."),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            path_type=Path,
            help="File with the token that calls must send as `authorization: Bearer`.",
        ),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(
            path_type=Path,
            help="SQLite file for versions, workers, shards and leases, created if missing. "
            "Without a file, a restart loses them.",
        ),
    ] = None,
    retention: Annotated[
        int, typer.Option(min=0, help="READY versions retained per model; 0 retains all.")
    ] = 2,
    forget_after_s: Annotated[
        float,
        typer.Option(
            min=1,
            max=_MAX_S,
            help="Seconds after which a RELEASING version without shards and leases is forgotten.",
        ),
    ] = 3600.0,
    max_ttl_s: Annotated[
        float,
        typer.Option(
            min=1, max=_MAX_S, help="Longest time to live that workers and leases may request."
        ),
    ] = 86_400.0,
    restart_grace_s: Annotated[
        float,
        typer.Option(
            min=0,
            max=_MAX_S,
            help="Minimum seconds that live workers and leases stay live after a restart or a "
            "pause of this process, unless their time to live is shorter.",
        ),
    ] = 30.0,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, help="Port for Prometheus metrics, off if absent; 0 picks a free one."
        ),
    ] = None,
    metrics_host: Annotated[
        str, typer.Option(help="IP address for metrics, which need no token.")
    ] = "127.0.0.1",
    grace_s: Annotated[
        float,
        typer.Option(
            min=0,
            max=_MAX_S,
            help="Seconds that calls in progress have after SIGTERM; then the state is closed.",
        ),
    ] = 10.0,
) -> None:
    """Run the control plane until SIGTERM or SIGINT.

    Prints the bound address as its only line of output; the metrics' URL goes to standard error.

    Example: refit-server serve --address 127.0.0.1:0 --metrics-port 9464
    """
    from refit_mx import RefitConfigError
    from refit_mx.control import Limits
    from refit_mx.control.auth import read_token
    from refit_server.address import Address
    from refit_server.server import BindError, StateError
    from refit_server.server import serve as serve_until_signal
    from refit_server.tls import TlsFiles

    try:
        asyncio.run(
            serve_until_signal(
                Address.parse(address),
                tls=TlsFiles(tls_cert, tls_key) if tls_cert and tls_key else None,
                token=read_token(token_file) if token_file is not None else None,
                state=state,
                limits=Limits(
                    retention=retention, forget_after_s=forget_after_s, max_ttl_s=max_ttl_s
                ),
                restart_grace_s=restart_grace_s,
                metrics=None if metrics_port is None else (metrics_host, metrics_port),
                grace_s=grace_s,
                on_ready=typer.echo,
                on_metrics=lambda url: typer.echo(f"refit-server: metrics at {url}", err=True),
            )
        )
    except (BindError, RefitConfigError, StateError, ValueError) as error:
        _refuse(str(error))


class _CheckCommand(OptionsCommand):
    def problems(self, values: Mapping[str, Any]) -> Iterator[str]:
        from refit_server.address import split_address

        try:
            split_address(values["address"])  # without a port, gRPC would connect to port 443
        except ValueError as error:
            yield f"--address: {error}"
        authority = values["tls_ca"]
        if authority is not None:
            try:
                authority.read_bytes()
            except OSError as error:
                yield f"--tls-ca: {authority}: {error.strerror}"
        elif values["tls_name"] is not None:
            yield "--tls-name: --tls-ca is missing; expected both"


@app.command(cls=_CheckCommand, epilog=_VARIABLES)
def check(
    address: Annotated[str, typer.Option(help="HOST:PORT of the server.")] = "127.0.0.1:50051",
    tls_ca: Annotated[
        Path | None, typer.Option(path_type=Path, help="PEM file of the certificates to trust.")
    ] = None,
    tls_name: Annotated[
        str | None, typer.Option(help="Expected name in the server's certificate.")
    ] = None,
    timeout_s: Annotated[float, typer.Option(min=0.01, max=_MAX_S, help="Seconds to wait.")] = 5.0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check a server's health: exit status 0 if it serves, else 1.

    Example: refit-server check --address 127.0.0.1:50051
    """
    from refit_server.check import SERVING, CheckError
    from refit_server.check import check as check_health

    try:
        status = check_health(address, tls_ca=tls_ca, tls_name=tls_name, timeout_s=timeout_s)
    except (CheckError, OSError) as error:
        _refuse(str(error))
    if json:
        typer.echo(dumps({"address": address, "status": status}))
    if status != SERVING:
        _refuse(f"{address}: {status}")


def _refuse(reason: str) -> NoReturn:
    typer.echo(f"refit-server: {reason}", err=True)
    raise typer.Exit(1)
