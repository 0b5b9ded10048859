"""The Python blocks of the pages run unchanged."""

import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1]
README = PACKAGE / "README.md"
ROOT = PACKAGE.parents[1]  # the isolation job has the same layout
DOCS_PAGE = ROOT / "docs" / "dataplane-core.md"
EXAMPLES = [page for page in (README, DOCS_PAGE, ROOT / "README.md") if page.exists()]


def python_blocks(page: Path) -> list[str]:
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    return blocks


@pytest.mark.parametrize("page", EXAMPLES, ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_the_python_examples_run(page: Path) -> None:
    names: dict[str, object] = {}
    for block in python_blocks(page):
        exec(compile(block, str(page), "exec"), names)
