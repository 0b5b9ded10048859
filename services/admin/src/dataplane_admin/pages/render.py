"""Template environment. Every value is made printable and escaped when written."""

from __future__ import annotations

from functools import cache
from typing import Any  # Any: what a template is given

from jinja2 import ChoiceLoader, Environment, PackageLoader, PrefixLoader, StrictUndefined
from markupsafe import Markup, escape

from dataplane_admin.pages import learning, marks, words
from dataplane_admin.pages.comparison import signed
from dataplane_admin.pages.links import Link, to
from observability.views.printable import printable


@cache
def environment(root_path: str) -> Environment:
    """Return the template environment of services whose pages are below ``root_path``.

    Services of one process share it, and with it the compiled templates.
    """

    def shown(value: Any) -> Any:
        """Return what `{{ value }}` writes: printable text, markup, or a full link."""
        if type(value) is Link:
            return f"{root_path}{printable(value)}"
        return printable(value) if type(value) is str else value

    templates = Environment(
        loader=ChoiceLoader(
            [
                PackageLoader("dataplane_admin.pages", "templates"),
                PrefixLoader({"views": PackageLoader("observability", "views")}),
            ]
        ),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=shown,
        auto_reload=False,
    )
    templates.filters.update(
        ago=words.ago,
        breakable=_breakable,
        capital=words.capital,
        count=words.count,
        duration=words.duration,
        exact=_exact,
        figure=learning.number,
        few=words.listed,
        plain=words.plain,
        shorten=words.shorten,
        signed=signed,
        size=words.size,
    )
    templates.globals.update(
        clock=words.clock, marks=marks, plural=words.plural, percent=words.percent, to=to
    )
    return templates


def _exact(value: object) -> Markup:
    """Return escaped text that is otherwise unchanged, for values that a form sends back."""
    return escape(str(value))


def _breakable(name: object) -> Markup:
    """Return a dotted name with break opportunities after dots and underscores."""
    text = escape(printable(name))
    return Markup(text.replace(".", Markup(".<wbr>")).replace("_", Markup("_<wbr>")))  # noqa: S704
