"""Steps as one page that needs nothing else: no server, no network, no script.

The page's policy lets in the one style sheet and the one script that stand in it, by their hashes,
and nothing from outside. What stands in it of others' names is printable text, escaped by Jinja.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from observability.views.files import write_whole
from observability.views.page import step_on_page
from observability.views.printable import printable
from observability.views.steps import Step

# Of so many steps all are open at first; of more only the first, and those that are not whole.
_OPEN = 3


def write_page(
    steps: Iterable[Step], path: str | Path, *, title: str = "Steps of a GRPO run"
) -> None:
    """Write a page that shows steps; the file is there whole or not at all.

    Raises:
        OSError: the file cannot be written.
    """
    write_whole(Path(path), page_of(list(steps), title=title).encode("utf-8"))


def page_of(steps: Sequence[Step], *, title: str = "Steps of a GRPO run") -> str:
    """The page as text."""
    style, script = _resource("page.css"), _resource("page.js")
    template = Environment(
        autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True
    ).from_string(_resource("page.html.j2"))
    shown = [
        step_on_page(
            step,
            anchor=f"step-{place}",
            is_open=place == 0 or len(steps) <= _OPEN or bool(step.incomplete),
        )
        for place, step in enumerate(steps)
    ]
    return template.render(
        title=printable(title),
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


def _resource(name: str) -> str:
    return files("observability.views").joinpath(name).read_text("utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"
