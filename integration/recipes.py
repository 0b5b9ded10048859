"""Code blocks of the pages in docs/recipes."""

from __future__ import annotations

import re
from pathlib import Path

RECIPES = Path(__file__).parents[1] / "docs" / "recipes"


def blocks(name: str, language: str) -> str:
    """Return the blocks of a page in one language, joined."""
    text = (RECIPES / f"{name}.md").read_text()
    return "\n".join(re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
