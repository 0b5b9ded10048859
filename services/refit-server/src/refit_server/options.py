"""Options of the commands: all problems are reported together, before anything starts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any  # Any: values of options, and typer's context and parameters

import typer
from typer.core import TyperCommand, TyperGroup


class OptionsCommand(TyperCommand):
    """A command that reports one line per wrong option and exits with status 2."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, with their environment variables left out of the help."""
        return _without_variables(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments.

        Raises:
            typer.Exit: an option is wrong.
        """
        if ctx.resilient_parsing:  # shell completion, of an unfinished line
            return super().parse_args(ctx, args)
        values, rest, _ = self.make_parser(ctx).parse_args(args=list(args))
        trial = type(ctx)(self, info_name=ctx.info_name, parent=ctx.parent)
        problems = []
        for parameter in self.get_params(trial):
            try:
                parameter.handle_parse_result(trial, dict(values), list(rest))
            except typer.BadParameter as error:
                option = max(parameter.opts, key=len)
                problems.append(f"{option}: {error.message or 'missing'}")
        problems += self.problems(trial.params)
        for line in problems:
            typer.echo(f"refit-server: {line}", err=True)
        if problems:
            raise typer.Exit(2)
        return super().parse_args(ctx, args)

    def problems(self, values: Mapping[str, Any]) -> Iterable[str]:
        """Yield further problems; ``values`` has the options whose type and range are valid."""
        return ()


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
