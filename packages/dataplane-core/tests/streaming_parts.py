"""Partition in memory, consumers with leases, and the samples that they got."""

from __future__ import annotations

import functools

import torch
from tensordict import TensorDict

from dataplane_core import InMemoryDataPlaneClient

SETUP = {"enabled": True, "impl": "in_memory"}


def store(count=10, **config):
    """Put samples ``s00``, ``s01``, ...; the field is their number, ``odd`` is a tag."""
    client = InMemoryDataPlaneClient({**SETUP, **config})
    client.register_partition("p", ["x"], count, ["a"])
    put(client, "p", count)
    return client


def put(client, partition, count):
    fields = TensorDict({"x": torch.arange(float(count))}, [count])
    tags = [{"odd": i % 2} for i in range(count)]
    client.put_samples([f"s{i:02d}" for i in range(count)], partition, fields, tags)


def leased(lease_s=1000.0):
    """Return a factory of clients of the newest store."""
    return functools.partial(
        InMemoryDataPlaneClient, {**SETUP, "claim_lease_s": lease_s}, bootstrap=False
    )


def ids(batches):
    return [sample_id for _, meta in batches for sample_id in meta.sample_ids]


def counts(client):
    counts = client.count_samples("p", "a", ["x"])
    return counts.ready, counts.leased, counts.acknowledged
