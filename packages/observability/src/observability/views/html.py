"""Steps as one self-contained HTML page that needs no server and no network.

The page's content security policy allows only its inline style sheet and script, which it names by
their hashes. Names from senders are made printable, then escaped by Jinja.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from observability.views.files import write_atomically
from observability.views.page import step_on_page
from observability.views.printable import printable
from observability.views.quantities import duration
from observability.views.steps import Step

_MAX_OPEN = 3
"""Maximum number of steps of a page that shows them all expanded.

If there are more, only the first step and the incomplete ones are expanded.
"""


def write_page(
    steps: Iterable[Step], path: str | Path, *, title: str = "Steps of a GRPO run"
) -> None:
    """Write the page of `page_of` to a file, atomically.

    Raises:
        OSError: the file cannot be written.
    """
    write_atomically(Path(path), page_of(list(steps), title=title).encode("utf-8"))


def page_of(steps: Sequence[Step], *, title: str = "Steps of a GRPO run") -> str:
    """Return a page that shows steps, as HTML."""
    style, script = _resource("page.css") + _resource("waterfall.css"), _resource("page.js")
    environment = Environment(
        loader=PackageLoader("observability", "views"),
        autoescape=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        finalize=_finalize,
    )
    environment.filters["duration"] = duration
    steps_on_page = [
        step_on_page(
            step,
            anchor=f"step-{index}",
            is_open=index == 0 or len(steps) <= _MAX_OPEN or bool(step.incomplete),
        )
        for index, step in enumerate(steps)
    ]
    return environment.get_template("page.html.j2").render(
        title=title,
        steps=steps_on_page,
        style=style,
        script=script,
        policy="; ".join(
            [
                "default-src 'none'",
                f"style-src '{_hash(style)}'",
                f"script-src '{_hash(script)}'",
                "base-uri 'none'",
                "form-action 'none'",
            ]
        ),
    )


def _finalize(value: object) -> object:
    """Return what Jinja inserts for a value: plain strings made printable, all else unchanged.

    Markup is a subclass of ``str``, and already escaped.
    """
    return printable(value) if type(value) is str else value


def _resource(name: str) -> str:
    return files("observability.views").joinpath(name).read_text("utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"
