"""The README's Python blocks run unchanged, and the tables of the pages match the code."""

import re
from dataclasses import asdict
from pathlib import Path

import pytest

from dataplane_core import DataPlaneClient, DataPlaneConfig, InMemoryDataPlaneClient
from dataplane_tq import TQDataPlaneClient

PACKAGE = Path(__file__).parents[1]
README = PACKAGE / "README.md"
DOCS = PACKAGE.parents[1] / "docs"  # the isolation job has the same folders
DOCS_PAGE = DOCS / "dataplane-tq.md"


def test_python_examples_run(cluster: None) -> None:
    """Run the README's blocks in order, on the running Ray."""
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    names: dict[str, object] = {"__name__": "__main__"}  # so that Ray ships functions by value
    try:
        for block in blocks:
            exec(compile(block, str(README), "exec"), names)
    finally:
        for value in names.values():
            if isinstance(value, DataPlaneClient):
                value.close()


@pytest.mark.slow  # only in the workspace: another release of the core may have other keys
def test_page_lists_every_configuration_key() -> None:
    table = DOCS_PAGE.read_text().split("## Configuration\n")[1].split("\n## ")[0]
    listed = [
        key
        for line in table.splitlines()
        if line.startswith("| `")
        for key in re.findall(r"`(\w+)`", line.split("|")[1])
    ]
    assert sorted(listed) == sorted(DataPlaneConfig.__annotations__)


def test_documented_capabilities_are_those_of_the_clients() -> None:
    page = (DOCS / "architecture.md").read_text()
    promises = page.split("## Promises\n")[1]
    names = re.findall(r"^\| `(\w+)` \|", promises, re.MULTILINE)
    for client in (InMemoryDataPlaneClient, TQDataPlaneClient):
        assert asdict(client.capabilities) == dict.fromkeys(names, True)
