"""Partition in memory, consumers with leases, and the samples that they got."""

from __future__ import annotations

import functools

import torch
from tensordict import TensorDict

from dataplane_core import InMemoryDataPlaneClient, StreamingDataLoader, StreamingDataset

SETUP = {"enabled": True, "impl": "in_memory"}
TIMEOUT_S = 20.0
ATTACH = functools.partial(InMemoryDataPlaneClient, bootstrap=False)


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


def dataset(make_client=ATTACH, size=4, *, kind=StreamingDataset, timeout_s=TIMEOUT_S, **options):
    return kind(
        make_client,
        "p",
        "a",
        required_fields=["x"],
        batch_size=size,
        timeout_s=timeout_s,
        **options,
    )


def committing(data, **options):
    """Return a loader that acknowledges samples at its commits alone."""
    return StreamingDataLoader(data, acknowledge_on="commit", **options)


def commit_all(loader):
    """Save a state, as a caller does with a model, and commit the samples done in it."""
    loader.state_dict()
    loader.commit()


def ids(batches):
    return [sample_id for _, meta in batches for sample_id in meta.sample_ids]


def counts(client):
    counts = client.inspector.count_samples("p", "a", ["x"])
    return counts.ready, counts.leased, counts.acknowledged
