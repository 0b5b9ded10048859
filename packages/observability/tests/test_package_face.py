"""What the package exports, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys

import observability


def test_every_public_name_exists_and_is_listed_in_order():
    assert all(hasattr(observability, name) for name in observability.__all__)
    types = [name for name in observability.__all__ if name[0].isupper()]
    others = [name for name in observability.__all__ if not name[0].isupper()]
    assert observability.__all__ == sorted(types) + sorted(others)


def test_looking_at_what_was_told_needs_neither_torch_nor_an_sdk():
    program = (
        "import sys, observability, observability.receiver, observability.views\n"
        "print(sorted({'torch', 'tensordict', 'ray', 'opentelemetry.sdk'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
