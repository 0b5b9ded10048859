"""Command ``serve``."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated

import typer

from dataplane_admin.checks import (
    LOOPBACK_HOSTS,
    canonical_host,
    canonical_origin,
    canonical_root_path,
    check_link,
    read_token,
)
from dataplane_admin.cli.options import checked
from dataplane_admin.cli.shared import log_to_standard_error, refuse
from dataplane_admin.serving import (
    exit_cleanly_on_signals,
    listen,
    make_collections_rare,
    resolve,
)

DEFAULT_DB = "dataplane-admin.sqlite"
_DAY_S = 86_400.0
_MAX_S = 1e9
_MAX_DAYS = 10_000
_MAX_BYTES = (1 << 63) - 1


def _store_url(db: str) -> str:
    return db if "://" in db else f"sqlite:///{db}"


def _check_db(db: str) -> None:
    if db != DEFAULT_DB:
        from dataplane_admin.store.engine import checked_url

        checked_url(_store_url(db))


def _check_alert_rules(path: Path) -> None:
    from dataplane_admin.alerts import load_rules

    load_rules(path)


def _check_pattern(pattern: str) -> None:
    from dataplane_admin.ingest import check_pattern

    try:
        check_pattern(re.compile(pattern))
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a valid regular expression: {error}") from None


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
            help="Seconds after which an unclaimed sample or a claim counts as stuck. "
            "A run is late after at least 60 s.",
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
    run_days: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=_MAX_DAYS,
            help="Days to retain runs and their curves, at least --retention-days; 0 for no limit.",
            show_default="as --retention-days",
        ),
    ] = None,
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
            help="Regular expression whose matches are replaced in text stored with "
            "--keep-sample-text. Can be repeated.",
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
    """Start the service and print its URL. Runs until SIGTERM or SIGINT.

    Example: dataplane-admin serve --db admin.sqlite --ray-address auto
    """
    exit_cleanly_on_signals()
    log_to_standard_error()
    token = None if token_file is None else read_token(token_file)
    try:
        address = resolve(host, port)
    except OSError as error:
        refuse(f"--host: cannot listen on {host!r}: {error.strerror}", status=2)
    if token is None and not address.is_loopback:
        refuse(
            f"--host: {host!r} is reachable from other machines; set --token-file or a loopback "
            "address",
            status=2,
        )
    try:
        listener, bound = listen(address)
    except OSError as error:
        refuse(f"--port: cannot listen on {address}: {error.strerror}")
    make_collections_rare()
    # These imports are slow, so wrong options are reported before them.
    from dataplane_admin.alerts import load_rules
    from dataplane_admin.app import create_app
    from dataplane_admin.serving.server import serve_on
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
                max_run_age_s=None if run_days is None else run_days * _DAY_S or math.inf,
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
        refuse(str(error))
    except StoreError as error:
        listener.close()
        refuse(f"--db: {error}")
    except OSError as error:
        listener.close()
        refuse(f"--db: {error.filename or db}: {error.strerror or error}")
    typer.echo(f"http://{bound}{settings.root_path}")
    serve_on(service, listener, shutdown_timeout_s=shutdown_timeout_s)
