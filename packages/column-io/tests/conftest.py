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


# How long an example takes depends on what else the machine does.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
