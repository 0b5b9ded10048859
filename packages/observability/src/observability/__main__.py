"""Entry point of ``python -m observability``."""

from __future__ import annotations

import sys

try:
    from observability.cli import app
except ModuleNotFoundError as error:
    sys.exit(
        f"python -m observability needs the extra observability[views] ({error.name} is missing)"
    )

if __name__ == "__main__":
    app(prog_name="python -m observability")
