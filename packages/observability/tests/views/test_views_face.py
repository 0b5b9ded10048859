"""The views show what they have, and import what they may."""

import ast
import sys
from pathlib import Path

from observability import views

SOURCES = sorted(Path(views.__file__).parent.glob("*.py"))
ALLOWED = {"dataplane_core", "jinja2", "observability", "rich"}


def test_every_public_name_exists_and_is_listed_in_order():
    assert all(hasattr(views, name) for name in views.__all__)
    assert views.__all__ == sorted(views.__all__)


def test_views_import_nothing_that_receives_or_sends():
    imported = set()
    for source in SOURCES:
        for node in ast.walk(ast.parse(source.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0
                module = str(node.module)
                assert module.startswith(("observability.views", "observability.records")) or (
                    not module.startswith("observability")
                )
                imported.add(module.partition(".")[0])
    assert imported - set(sys.stdlib_module_names) - {"__future__"} <= ALLOWED
