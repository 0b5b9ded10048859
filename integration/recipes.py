"""Code blocks of the pages in docs/recipes."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from integration.ports import hold_port

RECIPES = Path(__file__).parents[1] / "docs" / "recipes"


def blocks(name: str, language: str) -> str:
    """Return the blocks of a page in one language, joined."""
    text = (RECIPES / f"{name}.md").read_text()
    return "\n".join(re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL))


@contextmanager
def torchrun(ranks: int) -> Iterator[list[str]]:
    """Yield the command that runs a program on ranks of this machine.

    The port is reserved meanwhile: with ``--standalone``, another process may take it before
    torchrun listens on it.
    """
    with hold_port() as holder:
        host, port = holder.getsockname()
        address = ["--master-addr", host, "--master-port", str(port)]
        launcher = [sys.executable, "-m", "torch.distributed.run"]
        yield [*launcher, "--nproc-per-node", str(ranks), *address]
