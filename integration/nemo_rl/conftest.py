"""Paths of NeMo-RL's stand-in and of the doubles of rollout-actor's tests, for all processes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
PATHS = [
    str(FOLDER / "standin"),
    str(FOLDER.parents[1] / "packages" / "rollout-actor" / "tests"),
]
sys.path[:0] = PATHS
# Ray's workers are forked from a server that the first Ray of the session starts.
os.environ["PYTHONPATH"] = os.pathsep.join([*PATHS, os.environ.get("PYTHONPATH", "")])
