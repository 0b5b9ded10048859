"""Checks of command-line options; all wrong options are reported together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar  # Any: typer's context, parameters and arguments

import typer
from typer.core import TyperCommand, TyperGroup

_T = TypeVar("_T")


class OptionsCommand(TyperCommand):
    """A command that reports each wrong option on one line and exits with status 2."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, with their environment variables left out of the help."""
        return _without_variables(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. Raises typer.Exit if an option is wrong."""
        if ctx.resilient_parsing:  # shell completion, of an unfinished line
            return super().parse_args(ctx, args)
        values, rest, _ = self.make_parser(ctx).parse_args(args=list(args))
        trial = type(ctx)(self, info_name=ctx.info_name, parent=ctx.parent)
        problems = []
        for parameter in self.get_params(trial):
            try:
                parameter.handle_parse_result(trial, dict(values), list(rest))
            except typer.BadParameter as problem:
                name = max(parameter.opts, key=len)
                if parameter.param_type_name == "argument":
                    name = parameter.metavar or name.upper()
                reason = problem.message or f"missing; see {ctx.command_path} --help"
                problems.append(f"{name}: {reason}")
        if problems:
            for line in problems:
                typer.echo(f"dataplane-admin: {' '.join(line.split())}", err=True)
            raise typer.Exit(2)
        return super().parse_args(ctx, args)


class OptionsGroup(TyperGroup):
    """A group whose help fits into 80 columns."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, with their environment variables left out of the help."""
        return _without_variables(super().get_params(ctx))


def _without_variables(parameters: list[Any]) -> list[Any]:
    # The names are too long for a column of the help, which would cut them.
    for parameter in parameters:
        parameter.show_envvar = False
    return parameters


def checked(check: Callable[[Any], object]) -> Callable[[_T], _T]:
    """Return an option's callback that refuses the values that ``check`` refuses."""

    def callback(value: _T) -> _T:
        items = value if isinstance(value, list | tuple) else [value]
        for item in items:
            if item is None:
                continue
            try:
                check(item)
            except OSError as error:
                raise typer.BadParameter(
                    f"{error.filename or item}: {error.strerror or error}"
                ) from None
            except ValueError as error:
                raise typer.BadParameter(str(error)) from None
        return value

    return callback
