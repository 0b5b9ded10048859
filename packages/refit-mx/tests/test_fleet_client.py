"""A fleet of stand-in servers, over real HTTP: all at one version, or none resumed with another."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest
from stand_in_model import TinyConfig, TinyForCausalLM, checkpoint, digest_of
from vllm_servers import StandIn

from refit_mx.errors import FleetError, RefitConfigError
from refit_mx.fleet.client import RefitFleet

TP = (2, 1)
CONFIG = TinyConfig(layers=1)


@cache
def digests(version, tp):
    """Of each rank, when it holds ``v<n>``; 0 is what servers are launched with."""
    tensors = checkpoint(CONFIG, version)
    made = []
    for rank in range(tp):
        model = TinyForCausalLM(CONFIG, tp, rank)
        model.load_weights(tensors.items())
        made.append(digest_of(model))
    return made


@pytest.fixture(scope="module")
def started():
    servers = [StandIn("--tp", str(tp), "--config", '{"layers": 1}') for tp in TP]
    try:
        for server in servers:
            server.ready()
        yield servers
    finally:
        for server in servers:
            server.kill()


@pytest.fixture
def servers(started):
    """Two servers, of two ranks and of one, that serve."""
    yield started
    for server in started:
        server.revive()
        server.post("/resume")


@pytest.fixture
def fresh(started):
    """Two servers as launched."""
    for server in started:
        server.restart()
    yield started
    for server in started:
        server.revive()
        server.post("/resume")


def fleet_of(servers, **options):
    return RefitFleet([server.url for server in servers], **{"timeout_s": 60.0, **options})


def assert_serve(servers, version):
    for server, tp in zip(servers, TP, strict=True):
        state = server.state
        assert state["digests"] == digests(version, tp)
        assert state["version"] == f"v{version}"
        assert not state["is_paused"]


def assert_none_serves_another(servers, old, new):
    """None was resumed, and each rank holds one of the two, whole."""
    for server, tp in zip(servers, TP, strict=True):
        if server.process.poll() is not None:
            continue
        state = server.state
        assert state["is_paused"] or state["digests"] == digests(old, tp)
        for rank in range(tp):
            assert state["digests"][rank] in (digests(old, tp)[rank], digests(new, tp)[rank])


def test_every_server_holds_the_version_and_serves_it(servers):
    fleet = fleet_of(servers)
    for version in (1, 2):
        stats = fleet.refit(f"v{version}")
        assert_serve(servers, version)
        assert stats.servers == 2
        assert stats.workers == 3
        assert set(stats.seconds) == {"pause", "init", "start", "update", "finish", "resume"}
        assert set(fleet.holds.values()) == {f"v{version}"}


def test_asynchronous_callers_await_the_same(servers):
    fleet = fleet_of(servers)

    async def refit():
        with pytest.raises(RefitConfigError, match="await the asynchronous method"):
            fleet.refit("v3")
        task = asyncio.create_task(fleet.refit_async("v3"))
        while not fleet._under_way:
            await asyncio.sleep(0)
        with pytest.raises(RefitConfigError, match="under way"):
            await fleet.refit_async("v4")
        return await task

    asyncio.run(refit())
    assert_serve(servers, 3)


def test_a_request_that_runs_is_frozen_and_goes_on_with_the_new_weights(fresh):
    server = fresh[0]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(
            server.post, "/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 400}
        )
        server.wait_for("a request that runs", lambda state: state["running"] == 1)
        fleet_of(fresh).refit("v1")
        answer = running.result(120)
    assert answer["finish_reason"] == "length"
    assert len(answer["tokens"]) == 400
    seen = [
        digest
        for i, digest in enumerate(answer["weights_seen"])
        if i == 0 or (digest != answer["weights_seen"][i - 1])
    ]
    assert seen == [digests(0, 2), digests(1, 2)]
    assert server.state["pauses"][-1] == ["keep", "true"]


def test_the_pause_mode_can_be_chosen(servers):
    server = servers[0]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(
            server.post, "/v1/completions", {"prompt": [1], "max_tokens": 100_000}
        )
        server.wait_for("a request that runs", lambda state: state["running"] == 1)
        fleet_of(servers, pause_mode="abort", clear_cache=False).refit("v2")
        assert running.result(60)["finish_reason"] == "abort"
    assert server.state["pauses"][-1] == ["abort", "false"]


ROUTES = [
    "pause",
    "is_paused",
    "get_world_size",
    "init_weight_transfer_engine",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
    "update_weight_version",
    "resume",
]
KINDS = ["redirect", "flood", "not_json"]


@pytest.mark.parametrize(
    ("route", "kind"),
    [
        *((route, "error") for route in ROUTES),
        *((route, kind) for route in ("is_paused", "update_weights", "resume") for kind in KINDS),
        ("start_weight_update", "not_json"),
        ("finish_weight_update", "redirect"),
    ],
)
def test_invariant_9_a_server_that_fails_leaves_none_with_another_version(fresh_once, route, kind):
    servers, fleet, old = fresh_once
    new = old + 1
    if route == "init_weight_transfer_engine":
        fleet = fleet_of(servers)
    servers[1].fault(**{route: kind})
    if route == "start_weight_update":
        # An engine that refuses to start was restarted; it is initialised once more.
        fleet.refit(f"v{new}")
    else:
        with pytest.raises(FleetError) as caught:
            fleet.refit(f"v{new}")
        assert list(caught.value.failed) == [servers[1].url]
        assert f"/{route}" in caught.value.failed[servers[1].url]
        assert "No server was resumed with another version" in str(caught.value)
        assert_none_serves_another(servers, old, new)
        fleet.refit(f"v{new}")
    assert_serve(servers, new)


@pytest.fixture(scope="module")
def counted(started):
    """Servers that all tests of a group bring from version to version."""
    return {"version": 100}


@pytest.fixture
def fresh_once(started, counted):
    """Two servers at one version, a fleet that knows them, and the version's number."""
    counted["version"] += 2
    fleet = fleet_of(started)
    for server in started:
        server.revive()
    fleet.refit(f"v{counted['version']}")
    yield started, fleet, counted["version"]
    for server in started:
        server.revive()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("route", "kind"),
    [
        *(
            (route, kind)
            for route in (
                "pause",
                "start_weight_update",
                "update_weights",
                "finish_weight_update",
                "update_weight_version",
                "resume",
            )
            for kind in ("kill", "stop")
        ),
        ("update_weights", "kill_after"),
        ("finish_weight_update", "kill_after"),
        ("resume", "kill_after"),
        ("update_weights", "trickle"),
    ],
)
def test_a_server_killed_or_stopped_in_any_phase(fresh_once, route, kind):
    servers, _, old = fresh_once
    new, timeout_s, cleanup_s = old + 1, 3.0, 2.0
    fleet = fleet_of(servers, timeout_s=timeout_s, cleanup_timeout_s=cleanup_s)
    servers[0].fault(**{route: kind})
    began = time.monotonic()
    with pytest.raises(FleetError) as caught:
        fleet.refit(f"v{new}")
    assert time.monotonic() - began < timeout_s + 2 * cleanup_s + 2
    assert servers[0].url in caught.value.failed
    servers[0].revive()
    if kind == "stop":
        # What a stopped server had been sent it does late; nothing resumes it but `/resume`.
        servers[0].wait_for("an answer", lambda state: True)
    state = servers[1].state
    assert state["is_paused"]
    assert state["digests"] in (digests(old, 1), digests(new, 1))
    with pytest.raises(FleetError):
        fleet.resume()
    assert servers[1].state["is_paused"]
    fleet = fleet_of(servers)
    fleet.refit(f"v{new}")
    assert_serve(servers, new)


def test_an_install_that_fails_half_way_resumes_none_and_a_retry_heals(fresh_once):
    servers, fleet, old = fresh_once
    servers[0].fault(tear=True)
    with pytest.raises(FleetError, match="half way"):
        fleet.refit(f"v{old + 1}")
    states = [server.state for server in servers]
    assert all(state["is_paused"] for state in states)
    torn = states[0]["digests"][-1]
    assert torn not in (digests(old, 2)[1], digests(old + 1, 2)[1])
    assert fleet.holds == {servers[1].url: f"v{old + 1}"}
    with pytest.raises(FleetError, match="not all hold one version"):
        fleet.resume()
    assert all(server.state["is_paused"] for server in servers)
    fleet.refit(f"v{old + 1}")
    assert_serve(servers, old + 1)


def test_the_old_version_can_be_resumed_when_nothing_was_installed(fresh_once):
    servers, fleet, old = fresh_once
    servers[1].fault(update_weights="error")
    with pytest.raises(FleetError):
        fleet.refit(f"v{old + 1}")
    fleet.resume()
    assert_serve(servers, old)
    fleet.refit(f"v{old + 1}")
    assert_serve(servers, old + 1)


def test_the_old_version_can_be_resumed_when_one_could_not_even_be_paused(fresh_once):
    servers, fleet, old = fresh_once
    servers[0].fault(pause="error")
    with pytest.raises(FleetError):
        fleet.refit(f"v{old + 1}")
    assert not servers[0].state["is_paused"]
    assert servers[1].state["is_paused"]
    fleet.resume()
    assert_serve(servers, old)


@pytest.mark.slow
def test_a_server_that_was_restarted_meanwhile_is_not_taken_for_the_old_one(fresh_once):
    servers, fleet, old = fresh_once
    servers[0].fault(pause="error")
    servers[1].restart()
    with pytest.raises(FleetError):
        fleet.refit(f"v{old + 1}")
    assert digests(0, 1) == servers[1].state["digests"]
    with pytest.raises(FleetError) as caught:
        fleet.resume()
    assert servers[1].url in caught.value.failed
    assert servers[1].state["is_paused"]
    assert servers[0].state["digests"] == digests(old, 2)
    fleet.refit(f"v{old + 1}")
    assert_serve(servers, old + 1)


@pytest.mark.slow
def test_a_server_that_was_restarted_between_two_refits_is_brought_to_the_version(fresh_once):
    servers, fleet, old = fresh_once
    servers[1].restart()
    fleet.refit(f"v{old + 1}")
    assert_serve(servers, old + 1)


def test_what_a_driver_that_died_left_is_dropped(fresh_once):
    servers, _, old = fresh_once
    for server in servers:
        server.post("/pause?mode=keep")
        server.post("/start_weight_update", {})
        server.post("/update_weights", {"update_info": {"version_id": "v999"}})
    fleet_of(servers).refit(f"v{old + 1}")
    assert_serve(servers, old + 1)


def test_a_server_that_somebody_resumed_is_noticed_before_anything_is_installed(fresh_once):
    servers, fleet, old = fresh_once

    # The first server stops within its update, which holds the fleet before its last look.
    servers[0].fault(update_weights="stop")

    def resume_the_other():
        servers[0].wait_until_stopped()
        servers[1].wait_for("its update", lambda state: not state["busy"])
        servers[1].post("/resume")
        servers[0].process.send_signal(signal.SIGCONT)

    thread = threading.Thread(target=resume_the_other)
    thread.start()
    with pytest.raises(FleetError, match="restarted, or somebody resumed it"):
        fleet.refit(f"v{old + 1}")
    thread.join(60)
    for server, tp in zip(servers, TP, strict=True):
        assert server.state["digests"] == digests(old, tp)
    fleet.refit(f"v{old + 1}")
    assert_serve(servers, old + 1)


def test_another_number_of_workers_is_refused(servers):
    with pytest.raises(FleetError, match="3 workers in all; expected 4"):
        fleet_of(servers, world_size=4).refit("v1")
    for server in servers:
        assert server.state["is_paused"]


def test_routes_that_a_server_lacks_are_told(started):
    server = StandIn(dev_mode=False)
    try:
        with pytest.raises(FleetError, match="/pause: 404"):
            RefitFleet([server.ready().url], timeout_s=30).refit("v1")
    finally:
        server.kill()


def test_only_the_given_addresses_are_called(servers, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    fleet_of(servers).refit("v5")
    assert_serve(servers, 5)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1:8000",
        "ftp://127.0.0.1",
        "file:///etc/passwd",
        "http://",
        "http://user:secret@127.0.0.1",
        "http://127.0.0.1/v1",
        "http://127.0.0.1?mode=keep",
        "http://127.0.0.1#x",
        "http://127.0.0.1:port",
        "http://127.0.0.1:99999",
    ],
)
def test_addresses_with_more_than_a_host_and_a_port_are_refused(address):
    with pytest.raises(RefitConfigError, match="address"):
        RefitFleet([address])


@pytest.mark.parametrize(
    "arguments",
    [
        {"addresses": []},
        {"addresses": ["http://a:1", "http://a:1/"]},
        {"addresses": ["http://a:1"], "pause_mode": "later"},
        {"addresses": ["http://a:1"], "timeout_s": 0},
        {"addresses": ["http://a:1"], "cleanup_timeout_s": -1},
    ],
)
def test_wrong_arguments_are_refused(arguments):
    with pytest.raises(RefitConfigError, match="fleet"):
        RefitFleet(**arguments)


def test_a_version_without_a_name_is_refused():
    with pytest.raises(RefitConfigError, match="version_id"):
        RefitFleet(["http://127.0.0.1:9"]).refit("")


def test_a_port_where_nobody_listens_is_an_error_at_once():
    began = time.monotonic()
    with pytest.raises(FleetError, match="ConnectError"):
        RefitFleet(["http://127.0.0.1:9"], timeout_s=60).refit("v1")
    assert time.monotonic() - began < 30


def test_headers_reach_the_servers_and_no_error(servers):
    fleet = RefitFleet(
        ["http://127.0.0.1:9"], timeout_s=5, headers={"Authorization": "Bearer of-secrets"}
    )
    with pytest.raises(FleetError) as caught:
        fleet.refit("v1")
    assert "of-secrets" not in str(caught.value)
    assert "of-secrets" not in repr(fleet)
