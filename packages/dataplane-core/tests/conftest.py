"""Setup shared by the tests."""

import sys
from pathlib import Path

from hypothesis import settings

# Tests are imported by path, so put their shared modules on the path.
FOLDER = str(Path(__file__).parent)
if FOLDER not in sys.path:
    sys.path.insert(0, FOLDER)

# The duration of an example depends on the load of the machine.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
