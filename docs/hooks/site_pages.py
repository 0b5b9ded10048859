"""Hooks of mkdocs for the site.

- ``<!-- generated: NAME ARGUMENTS -->`` in a page becomes a table or API reference from
  `configuration_tables` or `api_pages`.
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
    """Return a README's text below its title, with links relative to a page."""
    folder = (ROOT / name).parent

    def link(match: re.Match[str]) -> str:
        target, hash_, anchor = match[2].partition("#")
        if not target or ":" in target:
            return match[0]
        linked = (folder / target).resolve()
        if linked.is_relative_to(DOCS):
            return f"[{match[1]}]({linked.relative_to(DOCS).as_posix()}{hash_}{anchor})"
        if not linked.is_file():  # folders are not copied
            return match[1]
        return f"[{match[1]}](../{linked.relative_to(ROOT).as_posix()}{hash_}{anchor})"

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
    """Add copies of the files outside ``docs/`` to which pages link."""
    for path in sorted({path for page in DOCS.rglob("*.md") for path in outside(page)}):
        files.append(File.generated(config, copy_of(path), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Insert generated parts, and link to copies."""
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
    """Inline diagrams, and keep names in tables on one line."""
    html = WORD.sub(r'<code class="word">\1</code>', html)
    return DIAGRAM.sub(lambda match: diagram(match[1]), html)


def expanded(markdown: str) -> str:
    """Replace the markers of a page by generated parts."""
    return MARKER.sub(lambda match: MAKERS[match[1]](*match[2].split()), markdown)


def diagram(name: str) -> str:
    """Return an SVG file as part of a page."""
    svg = (DOCS / "images" / name).read_text(encoding="utf-8")
    return f'<figure class="diagram">\n{svg[svg.index("<svg") :]}</figure>'


def outside(page: Path) -> list[Path]:
    """Return the files outside ``docs/`` to which a page links."""
    links = OUTSIDE.findall(expanded(page.read_text()))
    paths = [(page.parent / link).resolve() for link, _ in links]
    return [path for path in paths if is_outside(path) and not page_of(path)]


def is_outside(path: Path) -> bool:
    """Return whether a path is a file outside ``docs/``."""
    return path.is_file() and not path.is_relative_to(DOCS)


def page_of(path: Path) -> str | None:
    """Return the page with the text of a file outside ``docs/``."""
    return READMES.get(path.relative_to(ROOT).as_posix()) if is_outside(path) else None


def copy_of(path: Path) -> str:
    """Return the site path of a file's copy."""
    return "files/" + path.relative_to(ROOT).as_posix().replace("/", "-") + ".txt"
