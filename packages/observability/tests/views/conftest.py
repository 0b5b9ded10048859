"""Tests are imported by path, so the module they share has to be found."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
