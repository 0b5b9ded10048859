"""Fenced engines over HTTP: none serves a mixture, none is resumed, a full refit heals them."""

from __future__ import annotations

import time

import httpx
import pytest
from served_engines import assert_serve, digests, fleet_of, served
from vllm_servers import PATIENCE_S

from refit_mx.errors import FleetError

pytestmark = pytest.mark.slow

TIMEOUT_S, CLEANUP_S = 8.0, 3.0
START_S = 30.0
"""Beyond a fleet's own time limits, for a machine under load."""


@pytest.fixture(scope="module")
def whole():
    """See `served`."""
    with served("tcp") as made:
        yield made


@pytest.fixture(scope="module")
def seeds():
    return iter(range(1, 1000))


@pytest.fixture
def torn(whole, seeds):
    """The first server's second rank was left a mixture of two versions."""
    trainer, servers, info = whole
    old, new = next(seeds), next(seeds)
    fleet = fleet_of(servers, info)
    fleet.refit(trainer.publish(old))
    version = trainer.publish(new)
    servers[0].fault(tear=True)
    with pytest.raises(FleetError, match="FencedError") as caught:
        fleet.refit(version)
    assert list(caught.value.failed) == [servers[0].url]
    mixture = servers[0].state["digests"][-1]
    assert mixture not in (digests(old, 2)[-1], digests(new, 2)[-1])
    yield fleet, old, new, version
    for server in servers:
        server.revive()


def assert_all_paused(servers):
    assert all(server.state["is_paused"] for server in servers)


def test_no_client_resumes_a_fleet_of_which_one_is_fenced(whole, torn):
    _, servers, info = whole
    fleet, old, new, version = torn
    assert_all_paused(servers)
    with pytest.raises(FleetError, match="not all hold one version"):
        fleet.resume()
    # A client that was made after it knows nothing of it; the workers do.
    for holds, error in (
        (None, "PhaseError"),
        (f"v{old}", "PhaseError"),
        (version, "must not serve"),
    ):
        with pytest.raises(FleetError, match=error) as caught:
            fleet_of(servers, info, holds=holds).resume()
        assert servers[0].url in caught.value.failed
        assert_all_paused(servers)
    fleet.refit(version)
    assert_serve(servers, new)


def test_a_full_refit_of_any_client_lifts_the_fence_with_exact_bytes(whole, torn):
    _, servers, info = whole
    _, _, new, version = torn
    fleet_of(servers, info).refit(version)
    assert_serve(servers, new)
    answer = servers[0].post("/v1/completions", {"prompt": [3, 1], "max_tokens": 2})
    assert answer["weights_seen"] == [digests(new, 2)] * 2


def test_a_partial_refit_does_not(whole, torn):
    servers = whole[1]
    fleet, _, new, version = torn
    with pytest.raises(FleetError, match="only an update of all weights ends that"):
        fleet.refit(version, update_info={"names": ["model.norm.weight"]})
    assert_all_paused(servers)
    fleet.refit(version)
    assert_serve(servers, new)


def test_a_fenced_server_that_somebody_resumes_ends_before_it_serves_a_token(whole, torn):
    servers = whole[1]
    fleet, _, new, version = torn
    servers[0].post("/resume")
    answer = httpx.post(
        servers[0].url + "/v1/completions",
        json={"prompt": [3, 1], "max_tokens": 2},
        timeout=PATIENCE_S,
        trust_env=False,
    )
    assert answer.status_code == 500
    assert "the weights are a mixture, so nothing is computed" in answer.text
    # Its engine core has ended, as vLLM's does; whoever watches it starts it again.
    with pytest.raises(FleetError, match="EngineDeadError") as caught:
        fleet.refit(version)
    assert list(caught.value.failed) == [servers[0].url]
    servers[0].restart()
    fleet.refit(version)
    assert_serve(servers, new)


@pytest.mark.parametrize("fault", ["kill", "kill_after"])
@pytest.mark.parametrize("route", ["start_weight_update", "update_weights", "finish_weight_update"])
def test_a_server_that_is_killed_and_restarted_in_a_phase_is_brought_to_the_version(
    whole, seeds, route, fault
):
    trainer, servers, info = whole
    old, new = next(seeds), next(seeds)
    fleet = fleet_of(servers, info, timeout_s=TIMEOUT_S, cleanup_timeout_s=CLEANUP_S)
    fleet_of(servers, info).refit(trainer.publish(old))
    version = trainer.publish(new)
    servers[0].fault(**{route: fault})
    began = time.monotonic()
    with pytest.raises(FleetError) as caught:
        fleet.refit(version)
    assert time.monotonic() - began < TIMEOUT_S + 2 * CLEANUP_S + START_S
    assert servers[0].url in caught.value.failed
    state = servers[1].state
    assert state["is_paused"]
    assert state["digests"] in (digests(old, 1), digests(new, 1))
    servers[0].restart()
    # It serves what it was launched with, and the client that lost it must not resume that.
    with pytest.raises(FleetError):
        fleet.resume()
    assert_all_paused(servers)
    fleet_of(servers, info).refit(version)
    assert_serve(servers, new)


def test_a_new_client_resumes_what_all_workers_say_that_they_hold(whole, seeds):
    trainer, servers, info = whole
    seed = next(seeds)
    version = trainer.publish(seed)
    fleet_of(servers, info).refit(version)
    with pytest.raises(FleetError, match=f"holds version {version}; expected the weights of its"):
        fleet_of(servers, info).resume()
    assert_all_paused(servers)
    fleet_of(servers, info, holds=version).resume()
    assert_serve(servers, seed)
