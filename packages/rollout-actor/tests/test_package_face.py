"""The package shows what it has, and imports what it may."""

import ast
import sys
from pathlib import Path

import rollout_actor

SOURCES = sorted(Path(rollout_actor.__file__).parent.glob("*.py"))
ALLOWED = {
    "column_io",
    "dataplane_core",
    "numpy",
    "opentelemetry",  # the API
    "ray",
    "rollout_actor",
    "tensordict",
    "torch",
}


def test_every_public_name_exists_and_is_listed_in_order():
    assert all(hasattr(rollout_actor, name) for name in rollout_actor.__all__)
    constants = [name for name in rollout_actor.__all__ if name.isupper()]
    others = [name for name in rollout_actor.__all__ if not name.isupper()]
    assert rollout_actor.__all__ == sorted(constants) + sorted(others)


def test_imports_point_one_way():
    imported = set()
    for source in SOURCES:
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0
                imported.add(str(node.module).partition(".")[0])
    assert imported - set(sys.stdlib_module_names) - {"__future__"} <= ALLOWED
