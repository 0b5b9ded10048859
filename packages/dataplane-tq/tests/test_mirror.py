"""TransferQueue's own API on a data plane, with and without the mirror."""

from __future__ import annotations

import pytest
import ray
import torch
from directory_calls import until
from queue_setup import actor
from tensordict import TensorDict

from dataplane_core import ConfigError
from dataplane_tq import TQDataPlaneClient

pytestmark = pytest.mark.slow  # each starts a worker that imports TransferQueue


@pytest.fixture
def config(config):
    """Return a configuration with one storage unit, which starts faster than two."""
    return {**config, "num_storage_units": 1}


def put(client, ids, tags=None):
    client.register_partition("train", ["x"], 8, ["train"])
    fields = TensorDict({"x": torch.ones(len(ids), 4)}, batch_size=[len(ids)])
    client.put_samples(list(ids), "train", fields, tags)


def listed():
    """List all keys through TransferQueue's own API, in a process that imports nothing else."""

    # Ray pickles a nested function by value, so the worker does not import this module.
    @ray.remote(num_cpus=0, max_calls=1)  # TransferQueue allows one client per process
    def read():
        import sys

        import transfer_queue

        assert "dataplane_tq" not in sys.modules
        transfer_queue.init()
        return transfer_queue.kv_list()

    return ray.get(read.remote(), timeout=180)


def test_raw_clients_get_samples_of_the_configured_sampler(cluster, config):
    """TransferQueue's own clients also see claims of `TQDataPlaneClient` as consumed."""
    path = "transfer_queue.sampler:GRPOGroupNSampler"
    with TQDataPlaneClient({**config, "sampler": path}) as client:
        put(client, "abcdef")
        claimed = client.claim_meta("train", "train", ["x"], 2)
        engine = client._engine

        def unclaimed():
            status = engine.client.async_get_consumption_status("train", "train")
            consumed = engine.run("status", lambda: status)[1]
            # None: not reported yet.
            return None if consumed is None else int((consumed == 0).sum())

        until(lambda: unclaimed() == 4)
        rows = engine.run(
            "raw",
            engine.client.async_get_meta,
            data_fields=["x"],
            batch_size=4,
            partition_id="train",
            mode="fetch",
            task_name="train",
            sampling_config={"n_samples_per_prompt": 2},
        )
        assert rows.size == 4
        assert claimed.sample_ids == ["a", "b"]


def test_transfer_queues_own_api_lists_rows_and_tags(cluster, config):
    with TQDataPlaneClient(config) as client:
        put(client, "ab", [{"v": 1}, {"v": 2}])
        client.clear_samples(["a"], "train")  # waits until the put is reported
        assert listed() == {"train": {"b": {"v": 2}}}


def test_transfer_queues_own_api_cannot_clear_or_save_a_store(cluster, config, tmp_path):
    @ray.remote(num_cpus=0, max_calls=1)
    def attempts(folder):
        import transfer_queue

        transfer_queue.init()
        errors = []
        for attempt in (
            lambda: transfer_queue.kv_clear(keys=["a"], partition_id="train"),
            lambda: transfer_queue.save_checkpoint(folder),
        ):
            try:
                attempt()
                errors.append("")
            except (RuntimeError, ValueError) as error:
                errors.append(str(error))
        return errors

    with TQDataPlaneClient(config) as client:
        put(client, "ab")
        until(lambda: "a" in listed().get("train", {}))
        clear, save = ray.get(attempts.remote(str(tmp_path / "saved")), timeout=180)
        assert "belongs to a data plane; use TQDataPlaneClient to clear" in clear
        assert "belongs to a data plane; use TQDataPlaneClient to save" in save
        assert client.get_samples(["a"], "train", ["x"])["x"].tolist() == [[1.0] * 4]


def test_without_the_mirror_transfer_queue_runs_separately(cluster, config):
    with TQDataPlaneClient({**config, "transfer_queue_mirror": False}) as client:
        put(client, "ab")
        with pytest.raises(ValueError, match="TransferQueueController"):
            actor("TransferQueueController")
        assert listed() == {}
        assert client.get_samples(["b"], "train", ["x"])["x"].tolist() == [[1.0] * 4]


@pytest.mark.parametrize(
    "changes", [{"backend": "simple"}, {"sampler": "transfer_queue.sampler:SequentialSampler"}]
)
def test_mirror_cannot_be_disabled_where_it_is_needed(cluster, config, changes):
    with pytest.raises(ConfigError, match="transfer_queue_mirror"):
        TQDataPlaneClient({**config, "transfer_queue_mirror": False, **changes})
