"""Options of the command: each is checked, and all that are wrong are reported together."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar  # Any: typer's context and arguments

import typer
from typer.core import TyperCommand

_T = TypeVar("_T")

# A name in braces, also where more braces or a dollar stand around it, or in angle brackets.
_PLACEHOLDER = re.compile(r"\$?\{+\s*[A-Za-z_][\w.-]*\s*\}+|<[A-Za-z_][\w.-]*>")


class OptionsCommand(TyperCommand):
    """A command that refuses wrong options with one line for each, and exit status 1."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take the arguments.

        Raises:
            typer.Exit: an option is wrong.
        """
        values, rest, _ = self.make_parser(ctx).parse_args(args=list(args))
        trial = type(ctx)(self, info_name=ctx.info_name, parent=ctx.parent)
        problems = []
        for parameter in self.get_params(trial):
            try:
                parameter.handle_parse_result(trial, dict(values), list(rest))
            except typer.BadParameter as problem:
                option = max(parameter.opts, key=len)
                problems.append(f"{option}: {problem.message}")
        if problems:
            for line in problems:
                typer.echo(f"dataplane-admin: {' '.join(line.split())}", err=True)
            raise typer.Exit(1)
        return super().parse_args(ctx, args)


def checked(check: Callable[[Any], object]) -> Callable[[_T], _T]:
    """Return an option's callback that refuses the values that ``check`` refuses."""

    def callback(value: _T) -> _T:
        given = value if isinstance(value, list | tuple) else [value]
        for one in given:
            if one is None:
                continue
            try:
                check(one)
            except OSError as error:
                raise typer.BadParameter(
                    f"{error.filename or one}: {error.strerror or error}"
                ) from None
            except ValueError as error:
                raise typer.BadParameter(str(error)) from None
        return value

    return callback


def check_link(url: str) -> None:
    """Check the URL of a page that traces are linked to.

    Raises:
        ValueError: it is none of http or https, or has another placeholder than ``{trace_id}``.
    """
    if not url.lower().startswith(("http://", "https://")):
        raise ValueError(f"found {url!r}; expected http://... or https://...")
    for found in _PLACEHOLDER.findall(url):
        if found != "{trace_id}":
            raise ValueError(f"found the placeholder {found} in {url!r}; expected {{trace_id}}")
