"""Options and functions that the commands share."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, NoReturn, TextIO, cast

import structlog
import typer

from dataplane_admin.checks import read_token
from dataplane_admin.cli.options import checked

DEFAULT_URL = "http://127.0.0.1:8080"

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


class _StandardError:
    """Standard error that ignores failed writes, so that a closed pipe fails no thread."""

    def write(self, text: str) -> None:
        with suppress(OSError, ValueError):
            sys.stderr.write(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            sys.stderr.flush()


def log_to_standard_error() -> None:
    """Log to standard error; tracebacks omit local variables, which may hold requests.

    Standard output is reserved for the URL of the service.
    """
    *processors, _ = structlog.get_config()["processors"]
    renderer = structlog.dev.ConsoleRenderer(
        colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
    )
    structlog.configure(
        processors=[*processors, renderer],
        logger_factory=structlog.PrintLoggerFactory(cast("TextIO", _StandardError())),
    )


def refuse(reason: str, *, status: int = 1) -> NoReturn:
    """End the command after one line on standard error.

    ``status`` is 2 if an option is wrong.
    """
    typer.echo(f"dataplane-admin: {' '.join(reason.split())}", err=True)
    raise typer.Exit(status)
