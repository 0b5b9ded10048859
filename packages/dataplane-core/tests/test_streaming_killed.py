"""After a consumer is killed, the committed steps have seen every sample once."""

import functools
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from remote_store import serving
from streaming_parts import commit_all, committing, counts, dataset, leased, store

CONSUMER = """
import functools, json, os, signal, sys
import remote_store
from dataplane_core import StreamingDataLoader, StreamingDataset

def main():
    setup = json.loads(sys.argv[1])
    dataset = StreamingDataset(
        functools.partial(remote_store.Remote, setup["address"]), "p", "a",
        required_fields=["x"], batch_size=3, timeout_s=20.0,
    )
    loader = StreamingDataLoader(
        dataset, num_workers=setup["workers"], acknowledge_on="commit", renew_every_s=0.1
    )
    path, trained, step = setup["path"], [], 0
    with loader:
        for batch, meta in loader:
            assert batch["x"].tolist() == [float(i[1:]) for i in meta.sample_ids]
            trained += meta.sample_ids
            step += 1
            loader.ack(meta)
            if step % 2 == 0:
                if setup["die"] == "before save" and step == 4:
                    os.kill(os.getpid(), signal.SIGKILL)
                with open(path + ".new", "w") as file:
                    json.dump({"trained": trained, "loader": loader.state_dict()}, file)
                os.replace(path + ".new", path)
                if setup["die"] == "before commit" and step == 4:
                    os.kill(os.getpid(), signal.SIGKILL)
                loader.commit()
            if setup["die"] == "between" and step == 3:
                os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def served(tmp_path: Path):
    client = store(30, claim_lease_s=1.0)
    (tmp_path / "consumer.py").write_text(CONSUMER)

    def run(address, **setup) -> tuple[int, dict]:
        setup = {"address": address, "path": str(tmp_path / "state.json"), **setup}
        command = [sys.executable, str(tmp_path / "consumer.py"), json.dumps(setup)]
        paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        code = subprocess.run(command, timeout=100, env=environment).returncode
        return code, json.loads((tmp_path / "state.json").read_text())

    with serving(client) as address:
        yield client, functools.partial(run, address)


@pytest.mark.parametrize(
    ("die", "workers"),
    [("before save", 0), ("between", 0), ("before commit", 2)],
)
@pytest.mark.slow
def test_killed_consumer_leaves_every_sample_committed_once(served, die, workers):
    client, run = served
    code, saved = run(workers=workers, die=die)
    assert code == -signal.SIGKILL
    trained = saved["trained"]
    assert len(trained) in (6, 12)
    # This process resumes from the file alone, as a new one would.
    with committing(dataset(size=3)) as loader:
        loader.load_state_dict(saved["loader"])
        for batch, meta in loader:
            assert batch["x"].tolist() == [float(i[1:]) for i in meta.sample_ids]
            trained += meta.sample_ids
        loader.commit()
    assert sorted(trained) == [f"s{i:02d}" for i in range(30)]
    assert counts(client) == (0, 0, 30)


@pytest.mark.slow
def test_samples_of_a_killed_rank_reach_an_iterating_one(served):
    client, run = served
    with (
        ThreadPoolExecutor(1) as threads,
        committing(dataset(leased(1.0), 3), renew_every_s=0.1) as loader,
    ):
        killed = threads.submit(run, workers=0, die="between")
        while counts(client)[2] < 6:  # it commits two steps and dies in the third
            time.sleep(0.01)
        trained = []
        for _, meta in loader:
            trained += meta.sample_ids
            code, saved = killed.result()
        commit_all(loader)
    assert code == -signal.SIGKILL
    assert sorted(trained + saved["trained"]) == [f"s{i:02d}" for i in range(30)]
    assert counts(client) == (0, 0, 30)
