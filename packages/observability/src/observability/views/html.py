"""Steps as one self-contained HTML page that needs no server and no network.

The page's policy allows only its inline style sheet and script, by their hashes, and nothing
external. Names from senders are printable text, escaped by Jinja.
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

# Up to this many steps are all unfolded at first; else only the first and the incomplete ones.
_MAX_OPEN = 3


def write_page(
    steps: Iterable[Step], path: str | Path, *, title: str = "Steps of a GRPO run"
) -> None:
    """Write a page that shows steps, atomically.

    Raises:
        OSError: the file cannot be written.
    """
    write_atomically(Path(path), page_of(list(steps), title=title).encode("utf-8"))


def page_of(steps: Sequence[Step], *, title: str = "Steps of a GRPO run") -> str:
    """Return the HTML of a page that shows steps."""
    style, script = _resource("page.css") + _resource("waterfall.css"), _resource("page.js")
    environment = Environment(
        loader=PackageLoader("observability", "views"),
        autoescape=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        finalize=_shown,
    )
    environment.filters["duration"] = duration
    shown = [
        step_on_page(
            step,
            anchor=f"step-{place}",
            is_open=place == 0 or len(steps) <= _MAX_OPEN or bool(step.incomplete),
        )
        for place, step in enumerate(steps)
    ]
    return environment.get_template("page.html.j2").render(
        title=title,
        steps=shown,
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


def _shown(value: object) -> object:
    """Return the value that ``{{ value }}`` shows: a string made printable, markup unchanged."""
    return printable(value) if type(value) is str else value


def _resource(name: str) -> str:
    return files("observability.views").joinpath(name).read_text("utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"
