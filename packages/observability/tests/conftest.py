"""Lets the tests import what several of them share."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from observability.receiver import Receiver

FOLDER = str(Path(__file__).parent)
if FOLDER not in sys.path:
    sys.path.insert(0, FOLDER)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as made:
        yield made


# How long an example takes depends on what else the machine does.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
