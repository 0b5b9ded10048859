from __future__ import annotations

from collections.abc import Iterator

import pytest

from dataplane_core import DataPlaneClient, InMemoryDataPlaneClient


@pytest.fixture
def client() -> Iterator[DataPlaneClient]:
    with InMemoryDataPlaneClient() as client:
        client.register_partition("train", ["input_ids"], 8, ["train"])
        yield client
