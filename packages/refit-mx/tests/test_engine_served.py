"""The whole path: publishers, a control plane, servers in processes, and the fleet's client."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from served_engines import CONFIG, Trainer, assert_serve, digests, fleet_of, served
from stand_in_model import checkpoint, dense_forward
from vllm_servers import StandIn

from refit_mx.errors import FleetError, RefitConfigError
from refit_mx.fleet.client import RefitFleet

pytestmark = pytest.mark.slow

TRANSPORTS = ["tcp", "nixl"]


@pytest.fixture(scope="module", params=TRANSPORTS)
def whole(request):
    """See `served`."""
    if request.param == "nixl":
        from refit_mx.transports.nixl import nixl_available

        if (why := nixl_available()) is not None:
            pytest.skip(f"needs the package nixl-cu12: {why}")
    with served(request.param) as made:
        yield made


@pytest.fixture(scope="module")
def seeds():
    return iter(range(1, 1000))


def test_all_servers_generate_with_the_trained_weights(whole, seeds):
    trainer, servers, info = whole
    fleet = fleet_of(servers, info, world_size=3)
    for _ in range(3):
        seed = next(seeds)
        fleet.refit(trainer.publish(seed))
        assert_serve(servers, seed)
        expected, tokens = [], [3, 1, 4]
        for _ in range(8):
            expected.append(int(dense_forward(CONFIG, checkpoint(CONFIG, seed), tokens).argmax()))
            tokens.append(expected[-1])
        for server in servers:
            answer = server.post("/v1/completions", {"prompt": [3, 1, 4], "max_tokens": 8})
            assert answer["tokens"] == expected


def test_a_request_sees_whole_versions_only(whole, seeds):
    trainer, servers, info = whole
    old, new = next(seeds), next(seeds)
    fleet = fleet_of(servers, info)
    fleet.refit(trainer.publish(old))
    version = trainer.publish(new)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(
            servers[0].post, "/v1/completions", {"prompt": [5], "max_tokens": 150}
        )
        servers[0].wait_for("a request that runs", lambda state: state["running"] == 1)
        fleet.refit(version)
        answer = running.result(120)
    assert answer["finish_reason"] == "length"
    changes = [
        seen
        for i, seen in enumerate(answer["weights_seen"])
        if i == 0 or (seen != answer["weights_seen"][i - 1])
    ]
    assert changes in ([digests(old, 2), digests(new, 2)], [digests(new, 2)])


def test_a_version_that_does_not_exist_leaves_the_old_one_and_can_be_resumed(whole, seeds):
    trainer, servers, info = whole
    seed = next(seeds)
    fleet = fleet_of(servers, info)
    fleet.refit(trainer.publish(seed))
    with pytest.raises(FleetError, match="VersionNotFoundError") as caught:
        fleet.refit("v-of-nobody")
    assert len(caught.value.failed) == 2
    assert all(server.state["is_paused"] for server in servers)
    fleet.resume()
    assert_serve(servers, seed)


@pytest.mark.parametrize("fault", ["kill", "stop"])
@pytest.mark.parametrize("route", ["update_weights", "finish_weight_update"])
def test_a_server_killed_or_stopped_is_brought_back_to_the_version(whole, seeds, route, fault):
    trainer, servers, info = whole
    old, new = next(seeds), next(seeds)
    fleet_of(servers, info).refit(trainer.publish(old))
    version = trainer.publish(new)
    fleet = fleet_of(servers, info, timeout_s=6.0, cleanup_timeout_s=3.0)
    servers[0].fault(**{route: fault})
    began = time.monotonic()
    with pytest.raises(FleetError) as caught:
        fleet.refit(version)
    assert time.monotonic() - began < 30
    assert servers[0].url in caught.value.failed
    state = servers[1].state
    assert state["is_paused"]
    assert state["digests"] in (digests(old, 1), digests(new, 1))
    if fault == "stop":
        servers[0].wait_until_stopped()
    servers[0].revive()
    fleet_of(servers, info).refit(version)
    assert_serve(servers, new)


def test_publishers_that_died_are_an_error_and_all_servers_keep_what_they_had(whole, seeds):
    """The last test of its trainer."""
    trainer, servers, info = whole
    old = next(seeds)
    fleet = fleet_of(servers, info, timeout_s=60.0)
    fleet.refit(trainer.publish(old))
    version = trainer.publish(next(seeds))
    for publisher in trainer.publishers:
        publisher.close()
    with pytest.raises(FleetError):
        fleet.refit(version)
    fleet.resume()
    assert_serve(servers, old)


def test_the_older_form_of_the_interface_is_served_too(seeds):
    trainer = Trainer("tcp")
    server = StandIn("--backend", "mx", "--generation", "old", "--tp", "2")
    try:
        server.ready()
        info = {"control_address": trainer.server.address, "model_name": "tiny", "transport": "tcp"}
        server.post("/pause?mode=keep")
        server.post("/init_weight_transfer_engine", {"init_info": info})
        for _ in range(2):
            seed = next(seeds)
            server.post("/update_weights", {"update_info": {"version_id": trainer.publish(seed)}})
            assert server.state["digests"] == digests(seed, 2)
        server.post("/resume")
        pauses = server.state["pauses"]
        with pytest.raises(RefitConfigError, match="lacks /start_weight_update and /finish_weight"):
            RefitFleet([server.url], init_info={**info, "rank_offset": 0}, timeout_s=30).refit("v")
        assert server.state["pauses"] == pauses
        # Told to end, it says STALE for its receivers, and ends.
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == -signal.SIGTERM
    finally:
        server.kill()
        trainer.close()
