"""Commands that query a running service."""

from __future__ import annotations

from collections.abc import Mapping
from json import dumps
from pathlib import Path
from typing import Annotated

import typer

from dataplane_admin.checks import read_token
from dataplane_admin.cli.shared import DEFAULT_URL, AsJson, TokenFile, Url, refuse


def partitions(url: Url = DEFAULT_URL, token_file: TokenFile = None, json: AsJson = False) -> None:
    """List partitions and storage units of the live data plane.

    Example: dataplane-admin partitions --json
    """
    _show("/api/v1/partitions", {}, url, token_file, as_json=json)


def sample(
    sample_id: Annotated[str, typer.Argument(metavar="ID", help="Id of the sample.")],
    run: Annotated[
        str | None,
        typer.Option(help="Run to show; by default that of the live sample, else the newest."),
    ] = None,
    partition: Annotated[str | None, typer.Option(help="Search this partition only.")] = None,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """Show the lifecycle of one sample, from put to clear.

    Example: dataplane-admin sample s39_p0_g0
    """
    query = {"id": sample_id, "run": run, "partition": partition}
    _show("/api/v1/sample", query, url, token_file, as_json=json)


def traces(
    run: Annotated[str | None, typer.Option(help="Filter by run.")] = None,
    step: Annotated[int | None, typer.Option(min=0, help="Filter by step.")] = None,
    name: Annotated[str | None, typer.Option(help="Filter by part of the name.")] = None,
    service: Annotated[str | None, typer.Option(help="Filter by the name of a service.")] = None,
    min_s: Annotated[float | None, typer.Option(min=0, help="Minimum duration in seconds.")] = None,
    max_s: Annotated[float | None, typer.Option(min=0, help="Maximum duration in seconds.")] = None,
    error: Annotated[
        bool | None,
        typer.Option(
            "--error/--no-error", help="Only traces with failed spans, or only the others."
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Maximum number of traces.")] = 20,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """List traces, newest first.

    Example: dataplane-admin traces --run demo --error --limit 5
    """
    query = {
        "run": run,
        "step": step,
        "name": name,
        "service": service,
        "min_s": min_s,
        "max_s": max_s,
        "error": None if error is None else str(error).lower(),
        "limit": limit,
    }
    _show("/api/v1/traces", query, url, token_file, as_json=json)


def trace(
    trace_id: Annotated[
        str,
        typer.Argument(metavar="ID", help="Trace id; case, dashes and spaces are ignored."),
    ],
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """Show one trace and its critical path.

    Example: dataplane-admin trace c7ebe4297c782f035b3debe31eac3a22
    """
    _show("/api/v1/trace", {"id": trace_id}, url, token_file, as_json=json)


def why(
    run: Annotated[str | None, typer.Option(help="Filter by run.")] = None,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """List blocked tasks, longest first; silent processes last.

    Example: dataplane-admin why --run demo
    """
    _show("/api/v1/why", {"run": run}, url, token_file, as_json=json)
    if not json:
        _show("/api/v1/status", {}, url, token_file, as_json=False)


def alerts(
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of --alert-rules and exit.")
    ] = False,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """List raised alerts, most severe first, then the latest cleared ones.

    Example: dataplane-admin alerts --json
    """
    if schema:
        from dataplane_admin.alerts import rules_schema

        typer.echo(dumps(rules_schema(), indent=2))
    else:
        _show("/api/v1/alerts", {"limit": 20}, url, token_file, as_json=json)


def runs(
    text: Annotated[
        str | None, typer.Option(help="Filter by part of the id, of a tag or of the error.")
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
    json: AsJson = False,
) -> None:
    """List runs, by default those with the newest records first.

    Example: dataplane-admin runs --state failed --sort started
    """
    query = {
        "q": text,
        "state": state,
        "tag": tag,
        "sort": sort,
        "ascending": str(ascending).lower(),
        "limit": limit,
    }
    _show("/api/v1/runs", query, url, token_file, as_json=json)


def tag(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="Id of the run.")],
    tags: Annotated[
        list[str] | None,
        typer.Argument(metavar="TAG", help="Tags of the run; without any, all are removed."),
    ] = None,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """Replace the tags of a run; needs a service with --allow-actions and --token-file.

    Example: dataplane-admin tag demo/20261127-120000 good
    """
    change = {"run": run_id, "tags": tags or []}
    _show("/api/v1/actions/tag-run", {}, url, token_file, as_json=json, body=change)


def _show(
    path: str,
    query: Mapping[str, str | int | float | None],
    url: str,
    token_file: Path | None,
    *,
    as_json: bool,
    body: object = None,
) -> None:
    from dataplane_admin.cli.client import OptionError, RequestError, fetch
    from dataplane_admin.cli.terminal import show

    try:
        token = None if token_file is None else read_token(token_file)
        answer = fetch(url, path, query, token=token, body=body)
        if as_json:
            typer.echo(answer)
        else:
            show(path, answer)
    except (RequestError, OSError, ValueError) as error:
        refuse(str(error), status=2 if isinstance(error, OptionError) else 1)
