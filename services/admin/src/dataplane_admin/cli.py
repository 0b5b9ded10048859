"""The command ``dataplane-admin``: the service itself, and questions to one that runs."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, NoReturn

import structlog
import typer

from dataplane_admin.host import LOOPBACK_HOSTS, canonical_host
from dataplane_admin.listen import listen, resolve
from dataplane_admin.options import OptionsCommand, check_link, checked
from dataplane_admin.origin import canonical_origin
from dataplane_admin.root_path import canonical_root_path
from dataplane_admin.server import end_in_peace_on_signals, run
from dataplane_admin.token import read_token

# A traceback with local variables would show the token.
app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

DEFAULT_DB = "dataplane-admin.sqlite"
_DAY_S = 86_400.0

Url = Annotated[
    str, typer.Option(help="Address of the running service.", envvar="DATAPLANE_ADMIN_URL")
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        help="File with the service's bearer token.",
        envvar="DATAPLANE_ADMIN_TOKEN_FILE",
        callback=checked(read_token),
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the answer of the API as it is.")]

DEFAULT_URL = "http://127.0.0.1:8080"


def _store_url(db: str) -> str:
    return db if "://" in db else f"sqlite:///{db}"


def _check_db(db: str) -> None:
    if db != DEFAULT_DB:
        from dataplane_admin.store.engine import checked_url

        checked_url(_store_url(db))


@app.callback()
def main() -> None:
    """The admin service of a data plane."""


@app.command(cls=OptionsCommand)
def serve(
    host: Annotated[
        str, typer.Option(help="Address to listen on. Not loopback: needs --token-file.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")
    ] = 8080,
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the bearer token that every route but probes asks for.",
            callback=checked(read_token),
        ),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Further host that the Host header may name, without a port. Can be repeated.",
            callback=checked(canonical_host),
        ),
    ] = None,
    allowed_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="Further origin, such as https://admin.example, whose pages may send requests; "
            "for a proxy that changes the Host header. Can be repeated.",
            callback=checked(canonical_origin),
        ),
    ] = None,
    root_path: Annotated[
        str,
        typer.Option(
            help="Path below which a proxy serves the pages, such as /rl.",
            callback=checked(canonical_root_path),
        ),
    ] = "",
    db: Annotated[
        str,
        typer.Option(
            help="Where what arrives is kept: a file of SQLite, or postgresql+psycopg://...",
            envvar="DATAPLANE_ADMIN_DB",
            callback=checked(_check_db),
        ),
    ] = DEFAULT_DB,
    ray_address: Annotated[
        str | None,
        typer.Option(help="Ray cluster with the data plane to look into; 'auto' finds one here."),
    ] = None,
    poll: Annotated[
        float, typer.Option(min=0.05, max=3600, help="Seconds between two looks into it.")
    ] = 1.0,
    stuck_after: Annotated[
        float,
        typer.Option(
            min=1,
            help="Seconds from which unclaimed samples and claims that are held are shown, and "
            "before which nothing counts as stuck.",
        ),
    ] = 60.0,
    silent_after: Annotated[
        float,
        typer.Option(
            min=1,
            help="Seconds after which a process that is not heard of any more counts as gone; "
            "longer than the interval at which processes send metrics.",
        ),
    ] = 300.0,
    allow_actions: Annotated[
        bool, typer.Option("--allow-actions", help="Allow to change the data plane by hand.")
    ] = False,
    retention_days: Annotated[
        float, typer.Option(min=0, help="Days that telemetry is kept; 0 keeps it for good.")
    ] = 7.0,
    retention_bytes: Annotated[
        int, typer.Option(min=0, help="Bytes that are kept; 0 for no limit.")
    ] = 2 * 1024**3,
    keep_sample_text: Annotated[
        bool,
        typer.Option(
            "--keep-sample-text", help="Keep attributes that quote prompts and completions too."
        ),
    ] = False,
    jaeger_url: Annotated[
        str | None,
        typer.Option(
            help="Base of Jaeger's pages, to link traces to.", callback=checked(check_link)
        ),
    ] = None,
    tempo_url: Annotated[
        str | None,
        typer.Option(
            help="Page of a trace in Tempo or Grafana, with {trace_id} in it.",
            callback=checked(check_link),
        ),
    ] = None,
    shutdown_timeout_s: Annotated[
        int, typer.Option(min=1, help="Seconds that requests have to finish after SIGTERM.")
    ] = 10,
) -> None:
    """Serve until SIGTERM or SIGINT. The one line of output is the URL."""
    end_in_peace_on_signals()
    # Standard output is for the URL alone.
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    token = None if token_file is None else read_token(token_file)
    try:
        asked = resolve(host, port)
    except OSError as error:
        _refuse(f"--host: cannot listen on {host!r}: {error.strerror}")
    if token is None and not asked.is_loopback:
        _refuse(
            f"--host: {host!r} is reachable from other machines; give --token-file, or a loopback "
            "address"
        )
    try:
        listener, bound = listen(asked)
    except OSError as error:
        _refuse(f"--port: cannot listen on {asked}: {error.strerror}")
    # These take their time to be imported, which whoever asked wrongly need not wait for.
    from dataplane_admin.app import create_app
    from dataplane_admin.settings import Settings
    from dataplane_admin.store import Retention, StoreError

    try:
        settings = Settings(
            store_url=_store_url(db),
            token=token,
            allowed_hosts=(*LOOPBACK_HOSTS, *asked.hosts, *(allowed_host or [])),
            allowed_origins=tuple(allowed_origin or []),
            root_path=root_path,
            allow_actions=allow_actions,
            retention=Retention(
                max_age_s=retention_days * _DAY_S or None, max_bytes=retention_bytes or None
            ),
            ray_address=ray_address,
            poll_s=poll,
            stuck_after_s=stuck_after,
            silent_after_s=silent_after,
            keep_sample_text=keep_sample_text,
            jaeger_url=jaeger_url,
            tempo_url=tempo_url,
        )
        service = create_app(settings)
    except ValueError as error:
        listener.close()
        _refuse(str(error))
    except StoreError as error:
        listener.close()
        _refuse(f"--db: {error}")
    except OSError as error:
        listener.close()
        _refuse(f"--db: {error.filename or db}: {error.strerror or error}")
    typer.echo(f"http://{bound}{settings.root_path}")
    run(service, listener, shutdown_timeout_s=shutdown_timeout_s)


@app.command(cls=OptionsCommand)
def partitions(
    url: Url = DEFAULT_URL, token_file: TokenFile = None, as_json: AsJson = False
) -> None:
    """Show the partitions of the live data plane."""
    _show("/api/v1/partitions", {}, url, token_file, as_json=as_json)


@app.command(cls=OptionsCommand)
def sample(
    sample_id: Annotated[str, typer.Argument(metavar="ID", help="Id of the sample.")],
    partition: Annotated[str | None, typer.Option(help="Only in this partition.")] = None,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Show one sample from its put to its clear."""
    asked = {"id": sample_id, "partition": partition}
    _show("/api/v1/sample", asked, url, token_file, as_json=as_json)


@app.command(cls=OptionsCommand)
def traces(
    run_id: Annotated[str | None, typer.Option("--run", help="Only of this run.")] = None,
    step: Annotated[int | None, typer.Option(min=0, help="Only of this step.")] = None,
    name: Annotated[str | None, typer.Option(help="Only with this in their name.")] = None,
    min_s: Annotated[float | None, typer.Option(min=0, help="Only as long as this.")] = None,
    max_s: Annotated[float | None, typer.Option(min=0, help="Only as short as this.")] = None,
    error: Annotated[
        bool | None,
        typer.Option("--error/--no-error", help="Only with, or without, failed spans."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="At most so many.")] = 20,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Show traces, the newest first."""
    asked = {
        "run": run_id,
        "step": step,
        "name": name,
        "min_s": min_s,
        "max_s": max_s,
        "error": None if error is None else str(error).lower(),
        "limit": limit,
    }
    _show("/api/v1/traces", asked, url, token_file, as_json=as_json)


@app.command(cls=OptionsCommand)
def trace(
    trace_id: Annotated[
        str,
        typer.Argument(metavar="ID", help="Id of the trace; any case, dashes and spaces will do."),
    ],
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Show one trace: its facts and its critical path."""
    _show("/api/v1/trace", {"id": trace_id}, url, token_file, as_json=as_json)


@app.command(cls=OptionsCommand)
def why(
    run_id: Annotated[str | None, typer.Option("--run", help="Only of this run.")] = None,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Show why it is stuck, the longest wait first; last what is not heard of any more."""
    _show("/api/v1/why", {"run": run_id}, url, token_file, as_json=as_json)


def _show(
    path: str,
    asked: Mapping[str, str | int | float | None],
    url: str,
    token_file: Path | None,
    *,
    as_json: bool,
) -> None:
    from dataplane_admin.questions import AskError, ask
    from dataplane_admin.terminal import show

    try:
        token = None if token_file is None else read_token(token_file)
        body = ask(url, path, asked, token=token)
        if as_json:
            typer.echo(body)
        else:
            show(path, body)
    except (AskError, OSError, ValueError) as error:
        _refuse(str(error))


def _refuse(reason: str) -> NoReturn:
    typer.echo(f"dataplane-admin: {' '.join(reason.split())}", err=True)
    raise typer.Exit(1)
