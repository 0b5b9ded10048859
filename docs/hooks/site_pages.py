"""What mkdocs does not do by itself when it builds the site.

- ``<!-- generated: NAME ARGUMENTS -->`` in a page becomes what `configuration_tables` or
  `api_pages` make of the code.
- A link to a file of the repository outside of ``docs/`` becomes a link to a copy of it.
- A diagram is put into the page itself, so that it follows the page's light or dark scheme.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any  # Any: mkdocs has no complete types

from api_pages import api_page
from configuration_tables import command_table, settings_table, trainer_table, typed_dict_table
from mkdocs.structure.files import File

DOCS = Path(__file__).parents[1]
ROOT = DOCS.parent

MARKER = re.compile(r"^<!-- generated: (\w+)((?: \S+)*) -->$", re.MULTILINE)
MAKERS = {
    "api": api_page,
    "command": command_table,
    "settings": settings_table,
    "trainer": trainer_table,
    "typed_dict": typed_dict_table,
}
OUTSIDE = re.compile(r"\]\(((?:\.\./)+[^)#\s]+)\)")
WORD = re.compile(r"<code>([^<\s]{1,44})</code>")
DIAGRAM = re.compile(r'<p><img alt="[^"]*" src="(?:[^"]*/)?images/([\w-]+\.svg)" ?/?></p>')


def on_files(files: Any, config: Any) -> Any:
    """Copy what pages link to outside of the folder of the pages."""
    for path in sorted({path for page in DOCS.rglob("*.md") for path in outside(page)}):
        files.append(File.generated(config, copy_of(path), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Generated parts, and links to copies."""
    markdown = expanded(markdown)
    up = "../" * page.file.src_uri.count("/")
    base = Path(page.file.abs_src_path).parent

    def link(match: re.Match[str]) -> str:
        path = (base / match[1]).resolve()
        return f"]({up}{copy_of(path)})" if is_outside(path) else match[0]

    return OUTSIDE.sub(link, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Diagrams inside the page; names in tables stay in one line."""
    html = WORD.sub(r'<code class="word">\1</code>', html)
    return DIAGRAM.sub(lambda match: diagram(match[1]), html)


def expanded(markdown: str) -> str:
    """The page with its generated parts."""
    return MARKER.sub(lambda match: MAKERS[match[1]](*match[2].split()), markdown)


def diagram(name: str) -> str:
    """The SVG file as a part of a page."""
    svg = (DOCS / "images" / name).read_text(encoding="utf-8")
    return f'<figure class="diagram">\n{svg[svg.index("<svg") :]}</figure>'


def outside(page: Path) -> list[Path]:
    """Files of the repository outside of ``docs/`` to which a page links."""
    found = [(page.parent / link).resolve() for link in OUTSIDE.findall(page.read_text())]
    return [path for path in found if is_outside(path)]


def is_outside(path: Path) -> bool:
    """Whether it is a file that is not among the pages."""
    return path.is_file() and not path.is_relative_to(DOCS)


def copy_of(path: Path) -> str:
    """Where the copy of a file is in the site."""
    return "files/" + path.relative_to(ROOT).as_posix().replace("/", "-") + ".txt"
