"""A writer of a checkpoint that is killed at any moment leaves a complete one."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from dataplane_core import InMemoryDataPlaneClient, restore_partition, save_partition

KILLED = textwrap.dedent("""
    import os, random, signal, sys, time
    import torch
    from tensordict import TensorDict
    from dataplane_core import InMemoryDataPlaneClient
    from dataplane_core import save_partition

    def filled(generation):
        client = InMemoryDataPlaneClient()
        client.register_partition("train", ["x"], 10, ["train"])
        ids = [f"s{i}" for i in range(10)]
        x = torch.full((10, 50), float(generation))
        client.put_samples(ids, "train", TensorDict({"x": x}, [10]))
        return client

    def die_before(step):
        left = step

        def counted(real):
            def call(*args, **kwargs):
                nonlocal left
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1
                return real(*args, **kwargs)

            return call

        os.replace, os.fsync = counted(os.replace), counted(os.fsync)

    def in_a_child(work):
        # Nothing has used torch in this process, so its threads do not exist yet.
        child = os.fork()
        if child == 0:
            work()
            os._exit(0)
        return child

    def save_again(folder, step):
        save_partition(filled(0), "train", folder, batch=5)
        new = filled(1)
        die_before(step)
        save_partition(new, "train", folder, batch=5)

    def save_for_ever(folder, ready):
        clients = [filled(0), filled(1)]
        for number in range(10**9):
            save_partition(clients[number % 2], "train", folder, batch=5)
            if number == 0:
                os.write(ready, b"1")

    for step in range(9):
        child = in_a_child(lambda: save_again(f"{sys.argv[1]}/step{step}", step))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    chance = random.Random(7)
    for number in range(12):
        waiting, ready = os.pipe()
        child = in_a_child(lambda: save_for_ever(f"{sys.argv[1]}/moment{number}", ready))
        os.read(waiting, 1)
        time.sleep(chance.uniform(0, 0.03))  # not a wait: the moment of the kill
        os.kill(child, signal.SIGKILL)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
""")


def generation_in(folder: Path) -> float:
    target = InMemoryDataPlaneClient()
    assert restore_partition(target, folder) == 10
    x = target.get_samples([f"s{i}" for i in range(10)], "train", ["x"])["x"]
    assert x.unique().numel() == 1
    return x[0, 0].item()


@pytest.mark.slow
def test_killed_writer_leaves_a_complete_checkpoint(tmp_path: Path):
    """Kill before each sync and rename, and at random; the next save leaves no other files."""
    script, place = tmp_path / "killed.py", tmp_path / "checkpoints"
    place.mkdir()
    script.write_text(KILLED)
    command = [sys.executable, str(script), str(place)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    assert done.stdout.split() == [str(-signal.SIGKILL)] * 21
    # Five files and the folder are synced, then come the two renames and the last sync.
    generations = [generation_in(place / f"step{step}") for step in range(9)]
    assert generations == [0.0] * 8 + [1.0]
    assert all(generation_in(place / f"moment{number}") in (0.0, 1.0) for number in range(12))
    names = [f"step{step}" for step in range(9)] + [f"moment{number}" for number in range(12)]
    again = InMemoryDataPlaneClient()
    again.register_partition("train", [], 0, [])
    for name in names:
        save_partition(again, "train", place / name)
    assert sorted(os.listdir(place)) == sorted(names)
