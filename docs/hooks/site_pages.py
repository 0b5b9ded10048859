"""What mkdocs does not do by itself when it builds the site.

- ``<!-- generated: NAME ARGUMENTS -->`` in a page becomes what `configuration_tables` or
  `api_pages` make of the code.
- A link to a file of the repository outside of ``docs/`` becomes a link to a copy of it, or to the
  page that has its text.
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

READMES = {
    "deploy/kubernetes/README.md": "kubernetes.md",
    "docker/README.md": "containers.md",
    "integration/cluster/README.md": "two-machines.md",
}
"""File outside of ``docs/`` to the page that has its text."""


def readme(name: str) -> str:
    """The text of a README, below its title, with links as from a page."""
    folder = (ROOT / name).parent

    def link(match: re.Match[str]) -> str:
        target, hash_, anchor = match[2].partition("#")
        if not target or ":" in target:
            return match[0]
        found = (folder / target).resolve()
        if found.is_relative_to(DOCS):
            return f"[{match[1]}]({found.relative_to(DOCS).as_posix()}{hash_}{anchor})"
        if not found.is_file():  # of a folder there is no copy
            return match[1]
        return f"[{match[1]}](../{found.relative_to(ROOT).as_posix()}{hash_}{anchor})"

    text = (ROOT / name).read_text().partition("\n")[2]
    # The theme would fetch a script to draw it.
    text = text.replace("```mermaid\n", "```\n")
    return re.sub(r"\[([^\]]+)\]\(([^)\s]+)\)", link, text)


MARKER = re.compile(r"^<!-- generated: (\w+)((?: \S+)*) -->$", re.MULTILINE)
MAKERS = {
    "api": api_page,
    "command": command_table,
    "readme": readme,
    "settings": settings_table,
    "trainer": trainer_table,
    "typed_dict": typed_dict_table,
}
OUTSIDE = re.compile(r"\]\(((?:\.\./)+[^)#\s]+)(#[^)\s]*)?\)")
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
        if page_of(path):
            return f"]({up}{page_of(path)}{match[2] or ''})"
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
    links = OUTSIDE.findall(expanded(page.read_text()))
    found = [(page.parent / link).resolve() for link, _ in links]
    return [path for path in found if is_outside(path) and not page_of(path)]


def is_outside(path: Path) -> bool:
    """Whether it is a file that is not among the pages."""
    return path.is_file() and not path.is_relative_to(DOCS)


def page_of(path: Path) -> str | None:
    """The page that has the text of a file outside of ``docs/``."""
    return READMES.get(path.relative_to(ROOT).as_posix()) if is_outside(path) else None


def copy_of(path: Path) -> str:
    """Where the copy of a file is in the site."""
    return "files/" + path.relative_to(ROOT).as_posix().replace("/", "-") + ".txt"
