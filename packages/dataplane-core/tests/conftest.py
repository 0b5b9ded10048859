"""What the tests share."""

import sys
from pathlib import Path

from hypothesis import settings

# Tests are imported by path, so the modules they share have to be found.
FOLDER = str(Path(__file__).parent)
if FOLDER not in sys.path:
    sys.path.insert(0, FOLDER)

# How long an example takes depends on what else the machine does.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
