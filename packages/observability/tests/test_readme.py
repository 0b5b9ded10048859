"""The README's Python blocks run unchanged, and the package imports no heavy dependency."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import observability
from observability import views

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
assert BLOCKS


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_of_the_readme_runs(block):
    exec(compile(block, str(README), "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("module", [observability, views])
def test_every_public_name_exists(module):
    assert all(hasattr(module, name) for name in module.__all__)


def test_receiving_and_viewing_need_neither_torch_nor_an_sdk():
    program = (
        "import sys, observability, observability.receiver, observability.views\n"
        "print(sorted({'torch', 'tensordict', 'ray', 'opentelemetry.sdk'} & sys.modules.keys()))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout.strip() == "[]"
