"""Templates to HTML. Text of others is made printable and escaped wherever it is written out."""

from __future__ import annotations

from typing import Any  # Any: what a template is given

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from dataplane_admin.pages import words
from dataplane_admin.pages.comparison import signed
from dataplane_admin.pages.links import Link, to
from observability.views.printable import printable


def environment(root_path: str) -> Environment:
    """Make the templates' environment, for a service whose pages are below ``root_path``."""

    def shown(value: Any) -> Any:
        """What `{{ value }}` writes: printable text, a link below the root path, our markup."""
        if type(value) is Link:
            return f"{root_path}{printable(value)}"
        return printable(value) if type(value) is str else value

    made = Environment(
        loader=PackageLoader("dataplane_admin.pages", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=shown,
        auto_reload=False,
    )
    made.filters.update(
        ago=words.ago,
        breakable=_breakable,
        count=words.count,
        duration=words.duration,
        exact=_exact,
        few=words.listed,
        signed=signed,
        size=words.size,
        told=words.told,
    )
    made.globals.update(clock=words.clock, plural=words.plural, percent=words.percent, to=to)
    return made


def _exact(value: object) -> Markup:
    """Text as it is, escaped: for what a form has to send back unchanged."""
    return escape(str(value))


def _breakable(name: object) -> Markup:
    """A dotted name that may be broken behind its dots and underscores."""
    text = escape(printable(name))
    return Markup(text.replace(".", Markup(".<wbr>")).replace("_", Markup("_<wbr>")))  # noqa: S704
