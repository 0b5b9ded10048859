"""Options of the commands: all invalid options are reported together, before a command runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import Annotated, Any  # Any: values of options, and typer's context and commands

import typer
from typer.core import TyperCommand, TyperGroup

EXIT_STATUS = (
    "Exit status: 0 on success, 1 on failure, 2 for a wrong option, command or configuration."
)

Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a configuration key, for example grpo.num_steps=10. Can be repeated.",
    ),
]


AsJson = Annotated[
    bool,
    typer.Option("--json", help="Print the summary as JSON; progress goes to standard error."),
]


def version_option(command: str) -> Any:
    """Return the option that prints the version of ``command``."""

    def show(wanted: bool) -> None:
        if wanted:
            typer.echo(f"{command} {version('grpo-trainer')}")
            raise typer.Exit

    return typer.Option(
        "--version", callback=show, is_eager=True, help="Print the version and exit."
    )


class _Checked:
    """Command that refuses invalid options with one line for each, and exit status 2."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments.

        Raises:
            typer.Exit: an option is invalid.
        """
        if ctx.resilient_parsing:  # shell completion, of an unfinished line
            return self._parsed(ctx, args)
        command: Any = self
        values, rest, _ = command.make_parser(ctx).parse_args(args=list(args))
        trial = type(ctx)(command, info_name=ctx.info_name, parent=ctx.parent)
        wrong = []
        for parameter in command.get_params(trial):
            try:
                parameter.handle_parse_result(trial, dict(values), list(rest))
            except typer.BadParameter as problem:
                name = max(parameter.opts, key=len)
                if parameter.param_type_name == "argument":
                    name = parameter.metavar or name.upper()
                reason = problem.message or f"missing; see {ctx.command_path} --help"
                wrong.append(f"{name}: {reason}")
        if not rest:
            wrong += self.problems(trial.params)
        for line in wrong:
            typer.echo(f"error: {line}", err=True)
        if wrong:
            raise typer.Exit(2)
        return self._parsed(ctx, args)

    def _parsed(self, ctx: Any, args: list[str]) -> list[str]:
        remaining: list[str] = super().parse_args(ctx, args)  # type: ignore[misc]  # a mixin
        return remaining

    def problems(self, given: Mapping[str, Any]) -> Iterable[str]:
        """Yield problems beyond types and ranges.

        ``given`` has the options whose types and ranges are valid. Not called if a subcommand
        follows.
        """
        return ()


class OptionsCommand(_Checked, TyperCommand):
    """Command without subcommands."""


class OptionsGroup(_Checked, TyperGroup):
    """Group that is a command as well."""
