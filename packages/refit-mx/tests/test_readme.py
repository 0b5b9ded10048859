"""The Python examples of the README and of the docs page run unchanged."""

import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1]
README = PACKAGE / "README.md"
DOCS_PAGE = PACKAGE.parents[1] / "docs" / "refit-mx.md"  # not part of the source distribution
PAGES = [page for page in (README, DOCS_PAGE) if page.exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_examples_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    names = {"__name__": "__main__"}
    for block in blocks:
        exec(compile(block, str(page), "exec"), names)
