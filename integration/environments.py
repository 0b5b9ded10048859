"""uv, and environments for packages that the workspace's environment does not have."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
UV = os.environ.get("UV") or shutil.which("uv") or str(ROOT / ".tools" / "bin" / "uv")


def create_environment(folder: Path, python: str, *installed: Sequence[str]) -> str:
    """Create an environment; return its Python.

    Args:
        folder: folder to create.
        python: the Python to base it on.
        installed: arguments of ``uv pip install``, one call for each.
    """
    links = os.environ.get("PIP_FIND_LINKS", "")  # a CPU build of torch, say
    variables = {**os.environ, **({"UV_FIND_LINKS": links} if links else {})}
    created = str(folder / "bin" / "python")
    for command in (
        ["venv", "--quiet", "--python", python, str(folder)],
        *(["pip", "install", "--quiet", "--python", created, *each] for each in installed),
    ):
        subprocess.run([UV, *command], env=variables, check=True, timeout=900)
    return created
