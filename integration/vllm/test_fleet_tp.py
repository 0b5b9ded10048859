"""A server with two tensor-parallel ranks: both install a version, or neither does."""

from __future__ import annotations

import signal
from functools import partial

import httpx
import pytest
from integration.vllm.answers import PROMPTS, generate
from integration.vllm.fleet_rig import call, is_paused, on_workers, started_rig, statuses

from refit_mx import FleetError

TWO_RANKS = ("--tensor-parallel-size", "2")


@pytest.fixture(scope="module")
def rig(models, reference, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tp")
    with started_rig(models, reference, folder, *TWO_RANKS, servers=1) as rig:
        yield rig


LONG = pytest.mark.long
RANKS = [pytest.param(0, marks=LONG), 1]


@pytest.fixture
def serving(rig):
    fleet = rig.fleet()
    fleet.refit(rig.publish(0))
    return fleet


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_both_ranks_fetch_their_parts_of_uneven_slots(rig, transport):
    rig.refit(1, rig.fleet(init_info={"transport": transport}))
    rig.refit(0, rig.fleet(init_info={"transport": transport}))


@LONG
def test_ranks_share_a_key_head_and_tied_embeddings(models, reference, tmp_path):
    one_head = {"tied": True, "key_value_heads": 1}
    with started_rig(
        partial(models, **one_head),
        partial(reference, **one_head),
        tmp_path,
        *TWO_RANKS,
        servers=1,
    ) as rig:
        rig.refit(1)


@pytest.mark.parametrize("rank", RANKS)
def test_failed_fetch_of_one_rank_changes_neither(rig, serving, rank):
    on_workers(rig.servers[0], "fail_next_fetch", rank)
    version_id = rig.publish(1)
    with pytest.raises(FleetError, match=f"rank {rank}: .*the test makes this rank fail"):
        serving.refit(version_id)
    rig.assert_serve(0)
    serving.refit(version_id)
    rig.assert_serve(1, version_id)


@pytest.mark.parametrize("rank", RANKS)
def test_failed_install_of_one_rank_fences_both(rig, serving, rank):
    on_workers(rig.servers[0], "fail_next_install", rank)
    version_id = rig.publish(1)
    with pytest.raises(FleetError, match="the test makes this layer fail"):
        serving.refit(version_id)
    assert is_paused(rig.servers[0])
    assert all(status["fenced"] for status in statuses(rig.servers[0]))
    assert serving.server_versions == {}
    with pytest.raises(FleetError, match="not all hold one version"):
        serving.resume()
    serving.refit(version_id)
    rig.assert_serve(1, version_id)


@pytest.mark.parametrize("rank", RANKS)
def test_without_a_fleet_one_ranks_error_is_raised_by_both(rig, serving, rank):
    server = rig.servers[0]
    call(server, "/init_weight_transfer_engine", {"init_info": rig.trainer.init_info()})
    call(server, "/start_weight_update", {})
    on_workers(server, "fail_next_fetch", rank)
    info = {"version_id": rig.publish(1)}
    with pytest.raises(httpx.HTTPStatusError, match="500") as caught:
        call(server, "/update_weights", {"update_info": info})
    assert "the test makes this rank fail" in caught.value.response.text
    # Otherwise one rank's session would stay open, and no call could close it.
    rig.refit(1)


@pytest.mark.parametrize("phase", ["fetch", pytest.param("install", marks=LONG)])
def test_killed_rank_ends_the_server(rig, serving, phase):
    server = rig.servers[0]
    pid = server.workers()[1].pid
    on_workers(server, f"signal_in_next_{phase}", 0, pid, int(signal.SIGKILL))
    version_id = rig.publish(1)
    with pytest.raises(FleetError) as caught:
        serving.refit(version_id)
    assert list(caught.value.failed) == [server.address]
    assert serving.server_versions == {}
    with pytest.raises(httpx.HTTPError):
        generate(server.address, PROMPTS[0])
    server.kill()
    rig.revive()
    serving.refit(version_id)
    rig.assert_serve(1, version_id)


def test_unread_answers_do_not_reach_later_calls(rig, serving):
    server = rig.servers[0]
    # vLLM raises the error of rank 0 and leaves the answers of rank 1 unread.
    for _ in range(2):
        with pytest.raises(httpx.HTTPStatusError, match="500"):
            call(server, "/finish_weight_update", {})
    rig.refit(1)
    rig.refit(0, serving)
