"""Ranks of a vLLM server fail together: a missing rank is an error on all others, in time.

These tests use internals and replace vLLM's group by one of torch.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

RANKS = 3
LIMIT_S = 3
PROGRAM = """
import os, sys, time, types
import torch.distributed as dist
from refit_mx import RefitError

file, fault, rank, ranks, limit_s = *sys.argv[1:3], *map(int, sys.argv[3:])
dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks)
state = types.ModuleType("vllm.distributed.parallel_state")
state.get_world_group = lambda: types.SimpleNamespace(world_size=ranks, cpu_group=dist.group.WORLD)
for name in ("vllm", "vllm.distributed", state.__name__):
    sys.modules[name] = state
from refit_mx.engine.fence import gather_from_ranks

assert gather_from_ranks(f"rank {rank}", 120) == [f"rank {n}" for n in range(ranks)]
if rank == 1:
    if fault == "killed":
        os._exit(9)
    if fault == "killed after the barrier":
        dist.monitored_barrier()
        os._exit(9)
    if fault == "stopped after the barrier":
        dist.monitored_barrier()
    time.sleep(limit_s + 2)
began = time.monotonic()
try:
    gather_from_ranks("again", limit_s)
except RefitError as error:
    print(time.monotonic() - began, str(error).replace("\\n", " "), flush=True)
os._exit(0)  # the store of a group that has failed may block at exit
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", ["killed", "late", "killed after the barrier", "stopped after the barrier"]
)
def test_missing_rank_is_an_error_on_all_ranks(tmp_path, fault):
    arguments = [str(tmp_path / "group"), fault]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *arguments, str(rank), str(RANKS), str(LIMIT_S)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        written = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for number, (out, err) in enumerate(written):
        if number != 1 or fault == "late":
            seconds, _, error = out.partition(" ")
            assert float(seconds) < LIMIT_S + 10, err
            assert "not all 3 ranks of this vLLM server answer" in error
    assert ("Ranks 1 failed" in written[0][0]) == ("after" not in fault)


FINISH = """
import sys, types
import torch
from refit_mx import RefitError
from refit_mx.engine.infos import MxInitInfo, MxUpdateInfo

layerwise = types.ModuleType("refit_mx.engine.layerwise")
layerwise.LayerwiseReload = lambda model, config: None
sys.modules[layerwise.__name__] = layerwise
from refit_mx.engine import weight_transfer

def gather(text, timeout_s):
    if text:  # `init` succeeds
        raise RefitError("a rank is gone")
    return [text]

weight_transfer.gather_from_ranks = gather
config = types.SimpleNamespace(model="m")
for errors in ("status", "raise"):
    transfer = weight_transfer.MxWeightTransfer(
        torch.nn.Module(), config, rank=0, device=torch.device("cpu")
    )
    transfer.init(MxInitInfo(control_address="127.0.0.1:1", errors=errors))
    transfer.begin(MxUpdateInfo("v1", timeout_s=0.1))
    assert transfer.status()["fetch"] is not None
    raised = False
    try:
        transfer.finish()
    except RefitError:
        raised = True
    assert raised == (errors == "raise")
    status = transfer.status()
    assert (status["error"], status["fetch"]) == ("RefitError: a rank is gone", None), status
"""


def test_missing_rank_ends_the_fetch_and_is_the_error_of_a_finish():
    finished = subprocess.run(
        [sys.executable, "-c", FINISH], stderr=subprocess.PIPE, text=True, timeout=120
    )
    assert finished.returncode == 0, finished.stderr
