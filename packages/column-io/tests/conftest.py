from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from dataplane_core import DataPlaneClient, InMemoryDataPlaneClient


@pytest.fixture
def client() -> Iterator[DataPlaneClient]:
    with InMemoryDataPlaneClient() as client:
        client.register_partition("train", ["input_ids"], 8, ["train"])
        yield client


# The duration of an example depends on the load of the machine.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
