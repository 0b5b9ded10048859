"""The Python blocks of the pages run as they stand; their tables agree with the code."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dataplane_core
from dataplane_core import DataPlaneConfig, DataPlaneError, errors

PACKAGE = Path(__file__).parents[1]
README = PACKAGE / "README.md"
ROOT = PACKAGE.parents[1]  # laid out so in the isolation job too
DOCS_PAGE = ROOT / "docs" / "dataplane-core.md"
EXAMPLES = [page for page in (README, DOCS_PAGE, ROOT / "README.md") if page.exists()]


def python_blocks(page: Path) -> list[str]:
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    return blocks


def table_after(page: Path, heading: str) -> list[list[str]]:
    """The cells of the first table below ``heading``, without its two head lines."""
    lines = page.read_text().split(f"\n{heading}\n")[1].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


@pytest.mark.parametrize("page", EXAMPLES, ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_the_python_examples_run(page: Path) -> None:
    names: dict[str, object] = {}
    for block in python_blocks(page):
        exec(compile(block, str(page), "exec"), names)


def test_the_contract_suite_runs_as_the_page_shows_it(tmp_path: Path) -> None:
    [suite] = [block for block in python_blocks(DOCS_PAGE) if "DataPlaneClientContract" in block]
    (tmp_path / "test_my_client.py").write_text(suite)
    command = [sys.executable, "-m", "pytest", "-q", "-k", "claim_hands_out or own_copy", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert re.match(r"2 passed", done.stdout.splitlines()[-1]), done.stdout


def test_the_page_lists_every_error_and_what_else_it_is() -> None:
    listed = {
        name.strip("`"): {base.strip("` ") for base in bases.split(",")}
        for name, bases, _ in table_after(DOCS_PAGE, "## Errors")
    }
    actual = {
        name: {base.__name__ for base in error.__bases__} - {"DataPlaneError"}
        for name, error in inspect.getmembers(errors, inspect.isclass)
        if error.__module__ == errors.__name__ and error is not DataPlaneError
    }
    assert listed == actual


def test_the_page_lists_every_configuration_key() -> None:
    listed = [row[0].strip("`") for row in table_after(DOCS_PAGE, "## Configuration")]
    assert listed == list(DataPlaneConfig.__annotations__)


def test_the_readme_lists_every_public_name_and_no_other() -> None:
    table = README.read_text().split("## What there is")[1].split("`import")[0]
    listed = set(re.findall(r"`(\w+)`", table)) - {"testing"}
    public = set(dataplane_core.__all__)
    own_errors = {
        name for name in public if inspect.getmodule(getattr(dataplane_core, name)) is errors
    }
    assert listed <= public
    assert public - own_errors <= listed
