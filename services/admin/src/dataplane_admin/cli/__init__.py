"""Command ``dataplane-admin``: starts the service, and queries a running one."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, NoReturn

import structlog
import typer

from dataplane_admin.checks import (
    LOOPBACK_HOSTS,
    canonical_host,
    canonical_origin,
    canonical_root_path,
    check_link,
    read_token,
)
from dataplane_admin.cli.options import OptionsCommand, checked
from dataplane_admin.serving import exit_cleanly_on_signals, listen, resolve, serve_on

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

DEFAULT_DB = "dataplane-admin.sqlite"
_DAY_S = 86_400.0
_MAX_S = 1e9
_MAX_DAYS = 10_000
_MAX_BYTES = (1 << 63) - 1

Url = Annotated[str, typer.Option(help="URL of the service.", envvar="DATAPLANE_ADMIN_URL")]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        path_type=Path,
        help="File with the service's bearer token.",
        envvar="DATAPLANE_ADMIN_TOKEN_FILE",
        callback=checked(read_token),
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the API's JSON.")]

DEFAULT_URL = "http://127.0.0.1:8080"


def _store_url(db: str) -> str:
    return db if "://" in db else f"sqlite:///{db}"


def _log_to_standard_error() -> None:
    """Log to standard error, without local variables, which hold requests.

    Standard output has the URL only.
    """
    *processors, _ = structlog.get_config()["processors"]
    renderer = structlog.dev.ConsoleRenderer(
        colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
    )
    structlog.configure(
        processors=[*processors, renderer],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def _check_db(db: str) -> None:
    if db != DEFAULT_DB:
        from dataplane_admin.store.engine import checked_url

        checked_url(_store_url(db))


def _check_alert_rules(path: Path) -> None:
    from dataplane_admin.alerts import load_rules

    load_rules(path)


def _check_pattern(pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a valid regular expression: {error}") from None


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


@app.command(
    cls=OptionsCommand,
    epilog="Example: dataplane-admin serve --db admin.sqlite --ray-address auto",
)
def serve(
    host: Annotated[
        str, typer.Option(help="Address to listen on; needs --token-file unless loopback.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")
    ] = 8080,
    token_file: Annotated[
        Path | None,
        typer.Option(
            path_type=Path,
            help="File with the bearer token. Only probes, login and static files need none.",
            callback=checked(read_token),
        ),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Additional allowed Host header, without a port. Can be repeated.",
            callback=checked(canonical_host),
        ),
    ] = None,
    allowed_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="Additional allowed origin, such as https://admin.example, for a proxy that "
            "changes the Host header. Can be repeated.",
            callback=checked(canonical_origin),
        ),
    ] = None,
    root_path: Annotated[
        str,
        typer.Option(
            help="Path prefix at which a proxy serves the pages, such as /rl.",
            callback=checked(canonical_root_path),
        ),
    ] = "",
    db: Annotated[
        str,
        typer.Option(
            help="Database for telemetry: a SQLite file or a postgresql+psycopg URL.",
            envvar="DATAPLANE_ADMIN_DB",
            callback=checked(_check_db),
        ),
    ] = DEFAULT_DB,
    ray_address: Annotated[
        str | None,
        typer.Option(help="Ray cluster of the data plane to inspect; 'auto' for the local one."),
    ] = None,
    poll_s: Annotated[
        float, typer.Option(min=0.05, max=3600, help="Seconds between polls of the data plane.")
    ] = 1.0,
    stuck_after_s: Annotated[
        float,
        typer.Option(
            min=1,
            max=_MAX_S,
            help="Seconds after which unclaimed samples and held claims count as stuck.",
        ),
    ] = 60.0,
    silent_after_s: Annotated[
        float,
        typer.Option(
            min=1,
            max=_MAX_S,
            help="Seconds without telemetry after which a process counts as silent; set it above "
            "the metric export interval.",
        ),
    ] = 300.0,
    allow_actions: Annotated[
        bool,
        typer.Option(
            "--allow-actions", help="Allow changes to the data plane and to tags of runs."
        ),
    ] = False,
    retention_days: Annotated[
        float,
        typer.Option(min=0, max=_MAX_DAYS, help="Days to retain telemetry; 0 for no limit."),
    ] = 7.0,
    retention_bytes: Annotated[
        int,
        typer.Option(min=0, max=_MAX_BYTES, help="Bytes of telemetry to retain; 0 for no limit."),
    ] = 2 * 1024**3,
    alert_rules: Annotated[
        Path | None,
        typer.Option(
            path_type=Path,
            help="YAML file with rules and webhooks of alerts; see 'alerts --schema'.",
            show_default="built-in rules, no webhook",
            callback=checked(_check_alert_rules),
        ),
    ] = None,
    sample_text_days: Annotated[
        float,
        typer.Option(
            min=0, max=_MAX_DAYS, help="Days to retain turns and tokens of samples; 0 for no limit."
        ),
    ] = 1.0,
    load_days: Annotated[
        float,
        typer.Option(
            min=0,
            max=_MAX_DAYS,
            help="Days to retain the load of engines and nodes; 0 for no limit.",
        ),
    ] = 2.0,
    keep_sample_text: Annotated[
        bool,
        typer.Option(
            "--keep-sample-text", help="Also store text of samples, and attributes that quote it."
        ),
    ] = False,
    redact: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Regular expression whose matches are replaced in stored text. Can be repeated.",
            callback=checked(_check_pattern),
        ),
    ] = None,
    jaeger_url: Annotated[
        str | None,
        typer.Option(
            help="Base URL of Jaeger; trace pages link to it.", callback=checked(check_link)
        ),
    ] = None,
    tempo_url: Annotated[
        str | None,
        typer.Option(
            help="URL of a trace in Tempo or Grafana, with the placeholder {trace_id}.",
            callback=checked(check_link),
        ),
    ] = None,
    shutdown_timeout_s: Annotated[
        int,
        typer.Option(min=1, max=_MAX_S, help="Seconds for requests to finish after SIGTERM."),
    ] = 10,
) -> None:
    """Start the service and print its URL. Runs until SIGTERM or SIGINT."""
    exit_cleanly_on_signals()
    _log_to_standard_error()
    token = None if token_file is None else read_token(token_file)
    try:
        address = resolve(host, port)
    except OSError as error:
        _refuse(f"--host: cannot listen on {host!r}: {error.strerror}")
    if token is None and not address.is_loopback:
        _refuse(
            f"--host: {host!r} is reachable from other machines; set --token-file or a loopback "
            "address"
        )
    try:
        listener, bound = listen(address)
    except OSError as error:
        _refuse(f"--port: cannot listen on {address}: {error.strerror}")
    # These imports are slow, so wrong options are reported before them.
    from dataplane_admin.alerts import load_rules
    from dataplane_admin.app import create_app
    from dataplane_admin.settings import Settings
    from dataplane_admin.store import Retention, StoreError

    try:
        settings = Settings(
            store_url=_store_url(db),
            token=token,
            allowed_hosts=(*LOOPBACK_HOSTS, *address.hosts, *(allowed_host or [])),
            allowed_origins=tuple(allowed_origin or []),
            root_path=root_path,
            allow_actions=allow_actions,
            retention=Retention(
                max_age_s=retention_days * _DAY_S or None,
                max_bytes=retention_bytes or None,
                max_text_age_s=sample_text_days * _DAY_S or None,
                max_load_age_s=load_days * _DAY_S or None,
            ),
            ray_address=ray_address,
            poll_s=poll_s,
            stuck_after_s=stuck_after_s,
            silent_after_s=silent_after_s,
            alerts=load_rules(alert_rules),
            keep_sample_text=keep_sample_text,
            redact=tuple(re.compile(pattern) for pattern in redact or []),
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
    serve_on(service, listener, shutdown_timeout_s=shutdown_timeout_s)


@app.command(cls=OptionsCommand, epilog="Example: dataplane-admin partitions --json")
def partitions(
    url: Url = DEFAULT_URL, token_file: TokenFile = None, as_json: AsJson = False
) -> None:
    """List partitions and storage units of the live data plane."""
    _show("/api/v1/partitions", {}, url, token_file, as_json=as_json)


@app.command(cls=OptionsCommand, epilog="Example: dataplane-admin sample s39_p0_g0")
def sample(
    sample_id: Annotated[str, typer.Argument(metavar="ID", help="Id of the sample.")],
    partition: Annotated[str | None, typer.Option(help="Search this partition only.")] = None,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Show the lifecycle of one sample, put to clear."""
    query = {"id": sample_id, "partition": partition}
    _show("/api/v1/sample", query, url, token_file, as_json=as_json)


@app.command(
    cls=OptionsCommand, epilog="Example: dataplane-admin traces --run demo --error --limit 5"
)
def traces(
    run_id: Annotated[str | None, typer.Option("--run", help="Filter by run.")] = None,
    step: Annotated[int | None, typer.Option(min=0, help="Filter by step.")] = None,
    name: Annotated[str | None, typer.Option(help="Filter by part of the name.")] = None,
    min_s: Annotated[float | None, typer.Option(min=0, help="Minimum duration in seconds.")] = None,
    max_s: Annotated[float | None, typer.Option(min=0, help="Maximum duration in seconds.")] = None,
    error: Annotated[
        bool | None,
        typer.Option("--error/--no-error", help="Only traces with failed spans, or only without."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Maximum number of traces.")] = 20,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """List traces, newest first."""
    query = {
        "run": run_id,
        "step": step,
        "name": name,
        "min_s": min_s,
        "max_s": max_s,
        "error": None if error is None else str(error).lower(),
        "limit": limit,
    }
    _show("/api/v1/traces", query, url, token_file, as_json=as_json)


@app.command(
    cls=OptionsCommand, epilog="Example: dataplane-admin trace c7ebe4297c782f035b3debe31eac3a22"
)
def trace(
    trace_id: Annotated[
        str,
        typer.Argument(metavar="ID", help="Trace id; case, dashes and spaces are ignored."),
    ],
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Show one trace and its critical path."""
    _show("/api/v1/trace", {"id": trace_id}, url, token_file, as_json=as_json)


@app.command(cls=OptionsCommand, epilog="Example: dataplane-admin why --run demo")
def why(
    run_id: Annotated[str | None, typer.Option("--run", help="Filter by run.")] = None,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """List blocked tasks, longest first; silent processes last."""
    _show("/api/v1/why", {"run": run_id}, url, token_file, as_json=as_json)


@app.command(cls=OptionsCommand, epilog="Example: dataplane-admin alerts --json")
def alerts(
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of --alert-rules and exit.")
    ] = False,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """List raised alerts, most severe first, then the latest cleared ones."""
    if schema:
        from dataplane_admin.alerts import rules_schema

        typer.echo(json.dumps(rules_schema(), indent=2))
    else:
        _show("/api/v1/alerts", {"limit": 20}, url, token_file, as_json=as_json)


@app.command(
    cls=OptionsCommand, epilog="Example: dataplane-admin runs --state failed --sort started"
)
def runs(
    text: Annotated[
        str | None, typer.Option(help="Filter by part of the id, a tag or the error.")
    ] = None,
    state: Annotated[
        str | None,
        typer.Option(help="Filter by state: running, silent, finished, stopped or failed."),
    ] = None,
    tag: Annotated[str | None, typer.Option(help="Filter by tag.")] = None,
    sort: Annotated[
        str, typer.Option(help="Sort by seen, started, duration, steps or reward.")
    ] = "seen",
    ascending: Annotated[bool, typer.Option("--ascending", help="Smallest first.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Maximum number of runs.")] = 20,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """List runs, last reported first."""
    query = {
        "q": text,
        "state": state,
        "tag": tag,
        "sort": sort,
        "ascending": str(ascending).lower(),
        "limit": limit,
    }
    _show("/api/v1/runs", query, url, token_file, as_json=as_json)


@app.command(cls=OptionsCommand, epilog="Example: dataplane-admin tag demo/20261127-120000 good")
def tag(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="Id of the run.")],
    tags: Annotated[
        list[str] | None, typer.Argument(metavar="TAG", help="Its tags; none removes all.")
    ] = None,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Replace the tags of a run; needs a service with --allow-actions."""
    change = {"run": run_id, "tags": tags or []}
    _show("/api/v1/actions/tag-run", {}, url, token_file, as_json=as_json, body=change)


def _check_engine(url: str) -> None:
    from dataplane_admin.scrape import engine_name

    engine_name(url, "")


@app.command(
    cls=OptionsCommand,
    epilog="Example: dataplane-admin scrape --engine http://127.0.0.1:8000/metrics --node",
)
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
    run_id: Annotated[
        str, typer.Option("--run", help="Run that they belong to; without it, any run.")
    ] = "",
    interval_s: Annotated[
        float, typer.Option(min=1, max=3600, help="Seconds between two scrapes.")
    ] = 5.0,
) -> None:
    """Send the load of engines and of this node to the service. Runs until SIGTERM or SIGINT."""
    if not engine and not node:
        _refuse("nothing to scrape; expected --engine, --node or both")
    try:
        from dataplane_admin.scrape import scrape as run
    except ModuleNotFoundError as error:
        _refuse(f"{error.name} is not installed; install dataplane-admin with its extra 'scrape'")
    exit_cleanly_on_signals()
    _log_to_standard_error()
    token = None if token_file is None else read_token(token_file)
    run(engine or [], node=node, to=to, token=token, run_id=run_id, interval_s=interval_s)


def _show(
    path: str,
    query: Mapping[str, str | int | float | None],
    url: str,
    token_file: Path | None,
    *,
    as_json: bool,
    body: object = None,
) -> None:
    from dataplane_admin.cli.client import RequestError, fetch
    from dataplane_admin.cli.terminal import show

    try:
        token = None if token_file is None else read_token(token_file)
        answer = fetch(url, path, query, token=token, body=body)
        if as_json:
            typer.echo(answer)
        else:
            show(path, answer)
    except (RequestError, OSError, ValueError) as error:
        _refuse(str(error))


def _refuse(reason: str) -> NoReturn:
    typer.echo(f"dataplane-admin: {' '.join(reason.split())}", err=True)
    raise typer.Exit(1)
