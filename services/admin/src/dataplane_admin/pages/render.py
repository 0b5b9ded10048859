"""Template environment. Every value is made printable and escaped when written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC
from functools import cache
from typing import Any  # Any: what a template is given

from jinja2 import ChoiceLoader, Environment, PackageLoader, PrefixLoader, StrictUndefined
from markupsafe import Markup, escape

from dataplane_admin.pages import learning, marks, words
from dataplane_admin.pages.comparison import signed
from dataplane_admin.pages.links import Link, to, to_sample
from observability.views.printable import printable

_FORMS: Mapping[str, tuple[Callable[[Any], str], str]] = {
    "ago": (words.ago, "s"),
    "duration": (words.duration, "s"),
    "figure": (learning.number, ""),
    "percent": (words.percentage, "%"),
    "problems": (words.problems, ""),
    "size": (words.size, "bytes"),
    "yes": (words.yes, ""),
}
"""Formats of numbers in tables, each with the unit of the number."""


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
        cell=_cell,
        count=words.count,
        duration=words.duration,
        exact=_exact,
        figure=learning.number,
        few=words.listed,
        percentage=words.percentage,
        plain=words.plain,
        shorten=words.shorten,
        signed=signed,
        size=words.size,
    )
    templates.globals.update(
        clock=words.clock,
        marks=marks,
        moment=_moment,
        plural=words.plural,
        percent=words.percent,
        to=to,
        to_sample=to_sample,
        valued=_valued,
    )
    return templates


def _exact(value: object) -> Markup:
    """Return escaped text that is otherwise unchanged, for values that a form sends back."""
    return escape(str(value))


def _cell(value: float | None, form: str) -> Markup | str:
    """Return a formatted number of a table, with its value for downloads; see ``tables.js``."""
    write, unit = _FORMS[form]
    return write(value) if value is None else _valued(value, write(value), unit)


def _valued(value: float, text: str, unit: str = "") -> Markup:
    """Return a text, marked up with its number in ``unit`` for downloads."""
    number = f"{value:.12g}" if isinstance(value, float) else str(value).lower()
    named = Markup(' data-unit="{}"').format(unit) if unit else ""
    return Markup('<data value="{}"{}>{}</data>').format(number, named, text)


def _moment(time_ns: int | None, now_ns: int) -> Markup | str:
    """Return a time of a table as `words.clock` does, in UTC for downloads."""
    text = words.clock(time_ns, now_ns)
    if time_ns is None:
        return text
    at = words.instant(time_ns).astimezone(UTC).isoformat(timespec="milliseconds")
    return Markup('<time datetime="{}">{}</time>').format(at.replace("+00:00", "Z"), text)


def _breakable(name: object) -> Markup:
    """Return a dotted name with break opportunities after dots and underscores."""
    text = escape(printable(name))
    return Markup(text.replace(".", Markup(".<wbr>")).replace("_", Markup("_<wbr>")))  # noqa: S704
