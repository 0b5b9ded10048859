"""The README's Python blocks run unchanged."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)


def test_the_readme_shows_python():
    assert BLOCKS


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_of_the_readme_runs(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # folder of its files
    exec(compile(block, str(README), "exec"), {"__name__": "__main__"})
