"""Options of the commands: all problems are reported together, before anything starts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any  # Any: values of options, and typer's context

import typer
from typer.core import TyperCommand


class OptionsCommand(TyperCommand):
    """A command that reports one line per wrong option and exits with status 1."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments.

        Raises:
            typer.Exit: an option is wrong.
        """
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
            raise typer.Exit(1)
        return super().parse_args(ctx, args)

    def problems(self, values: Mapping[str, Any]) -> Iterable[str]:
        """Yield further problems of ``values``: the options with a valid type and range."""
        return ()
