"""Errors and bounds of a fleet's client; integration/vllm has refits of real vLLM servers."""

from __future__ import annotations

import asyncio
import time

import pytest
from scripted_server import ScriptedServer, json_answer

from refit_mx import FleetError, RefitConfigError, RefitFleet

RANK = {"vllm": "0.32.0", "backend": "mx", "session": False, "rank": 0}


def fleet_of(addresses, **options):
    return RefitFleet(addresses, init_info={"control_address": "127.0.0.1:9"}, **options)


@pytest.fixture
def scripted():
    """Start servers that are closed after the test."""
    servers = []

    def start(answer):
        servers.append(ScriptedServer(answer))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def vllm(changes):
    """Return a server's answers; ``changes`` replaces some by path: iterables or functions."""

    def answer(method, path, body):
        changed = changes.get(path.partition("?")[0])
        if changed is not None:
            return changed(body) if callable(changed) else changed
        if path == "/version":
            return [json_answer({"version": "0.32.0"})]
        if path == "/collective_rpc":
            return [json_answer({"results": [{**RANK, "nonce": body["args"][0]}]})]
        if path == "/get_world_size":
            return [json_answer({"world_size": 1})]
        return [json_answer({"error": path}, "500 Internal Server Error")]

    return answer


def refit(*servers, **options):
    fleet_of([server.url for server in servers], **{"timeout_s": 20.0, **options}).refit("v1")


def assert_only_queried(*servers):
    """Check that the servers got queries only."""
    for server in servers:
        paths = {path for _, path in server.requests}
        assert paths <= {"/version", "/collective_rpc", "/get_world_size"}


@pytest.mark.parametrize("version", ["0.22.1", "0.24.0", "0.34.0", "1.0.0", "dev", "", None, 32])
def test_unsupported_vllm_is_refused_before_the_pause(scripted, version):
    other = scripted(vllm({"/version": [json_answer({"version": version})]}))
    known = scripted(vllm({}))
    with pytest.raises(RefitConfigError, match=r"supports vLLM 0\.25 to 0\.33") as caught:
        refit(known, other)
    assert other.url in str(caught.value)
    assert repr(version) in str(caught.value)
    assert known.url not in str(caught.value)
    assert_only_queried(known, other)


@pytest.mark.parametrize("version", ["0.25.0", "0.28.1.dev3+cpu", "0.33.0rc1"])
def test_supported_vllm_is_initialized(scripted, version):
    server = scripted(vllm({"/version": [json_answer({"version": version})]}))
    with pytest.raises(FleetError, match="/init_weight_transfer_engine"):
        refit(server)


def without(body):
    text = "Worker failed with error ''CPUWorker' object has no attribute 'refit_status''"
    return [json_answer({"error": {"message": text}}, "500 Internal Server Error")]


def with_backend(name):
    return lambda body: [
        json_answer({"results": [{**RANK, "backend": name, "nonce": body["args"][0]}]})
    ]


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"/collective_rpc": [json_answer({}, "404 Not Found")]}, "VLLM_SERVER_DEV_MODE=1"),
        ({"/collective_rpc": without}, "--worker-extension-cls refit_mx.engine.status.RefitStatus"),
        ({"/collective_rpc": with_backend(None)}, "--weight-transfer-config"),
        ({"/collective_rpc": with_backend("NCCLWeightTransferEngine")}, "'NCCLWeight.*start vLLM"),
        ({"/get_world_size": [json_answer({"world_size": 4})]}, "for each data-parallel replica"),
        ({"/get_world_size": [json_answer({"world_size": True})]}, "is True, but 1 workers answer"),
        ({"/get_world_size": [json_answer({})]}, "None"),
    ],
)
def test_server_with_wrong_options_gets_advice(scripted, changes, advice):
    other, known = scripted(vllm(changes)), scripted(vllm({}))
    with pytest.raises(RefitConfigError, match=advice) as caught:
        refit(known, other)
    assert other.url in str(caught.value)
    assert_only_queried(known, other)


REDIRECT = b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:9/\r\nContent-Length: 0\r\n\r\n"
HOSTILE = {
    "a redirect": ([REDIRECT], "redirects elsewhere"),
    "no JSON": ([b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n<>"], "not JSON"),
    "no object": ([json_answer([1])], "refit_status"),
    "other fields": ([json_answer({"results": [{"rank": "first"}]})], "refit_status"),
    "no ranks": ([json_answer({"results": []})], "no rank has answered"),
    "old answers": (
        [json_answer({"results": [{**RANK, "nonce": "of an earlier call"}]})],
        "keeps answering earlier queries",
    ),
    "no HTTP": ([b"\x00" * 100], "RemoteProtocolError"),
    "a flood": (
        [b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n", b"x" * (3 << 20)],
        "more than 1048576 bytes",
    ),
    "a failure": ([json_answer({"error": "of the test"}, "500 Internal")], "500.*of the test"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_invalid_answer_is_a_clear_error(scripted, name):
    answer, named = HOSTILE[name]
    server = scripted(vllm({"/collective_rpc": answer}))
    with pytest.raises(FleetError, match=named) as caught:
        refit(server, timeout_s=10.0)
    assert list(caught.value.failed) == [server.url]
    assert_only_queried(server)


@pytest.mark.parametrize(
    "parts",
    [
        [30.0],
        [b"HTTP/1.1 200 OK\r\nContent-Length: 600\r\n\r\n", *[b" ", 0.1] * 300],
        [b"HTTP/1.1 200 OK\r\n", *[b"X-Header: of many\r\n", 0.1] * 300],
    ],
    ids=["silent", "trickling body", "trickling headers"],
)
def test_endless_answer_ends_at_the_deadline(scripted, parts):
    server = scripted(vllm({"/version": parts}))
    began = time.monotonic()
    with pytest.raises(FleetError, match="no answer"):
        refit(server, timeout_s=1.0, cleanup_timeout_s=1.0)
    assert time.monotonic() - began < 15


def test_query_is_retried_after_a_closed_connection(scripted):
    closed = iter(range(3))

    def version(body):
        return [] if next(closed, None) is not None else [json_answer({"version": "0.24.0"})]

    server = scripted(vllm({"/version": version}))
    with pytest.raises(RefitConfigError, match=r"'0\.24\.0'"):
        refit(server)
    assert server.requests == [("GET", "/version")] * 4


def test_modifying_call_is_not_retried(scripted):
    session = []

    def status(body):
        rank = {**RANK, "initialized": True, "session": bool(session), "nonce": body["args"][0]}
        return [json_answer({"results": [rank]})]

    server = scripted(
        vllm(
            {
                "/collective_rpc": status,
                "/init_weight_transfer_engine": [json_answer({})],
                "/start_weight_update": [],
            }
        )
    )
    with pytest.raises(FleetError, match=r"/start_weight_update: rank 0: .* no session.*Protocol"):
        refit(server)
    assert server.requests.count(("POST", "/start_weight_update")) == 1
    assert not any(path == "/pause" for _, path in server.requests)


def fetching(state, *, slow_query_s=0.0):
    """Return answers of a server that fetches; one query of its state takes a while to answer."""
    called = []

    def record(path):
        return lambda body: (called.append(path), [json_answer({})])[1]

    def status(body):
        rank = {**RANK, "initialized": True, "nonce": body["args"][0]}
        rank["session"] = "/start_weight_update" in called
        if "/update_weights" not in called:
            return [json_answer({"results": [rank]})]
        called.append("status")
        rank["fetch"] = {"version_id": "v1", "state": state}
        # The first query confirms that the fetch began.
        parts = [slow_query_s] if called.count("status") == 2 else []
        return [*parts, json_answer({"results": [rank]})]

    paths = ("/init_weight_transfer_engine", "/start_weight_update", "/update_weights")
    return vllm({"/collective_rpc": status, **{path: record(path) for path in paths}})


def test_query_in_progress_when_the_fetch_time_ends_is_answered(scripted):
    slow, late = scripted(fetching("received", slow_query_s=6.1)), scripted(fetching("running"))
    with pytest.raises(FleetError, match=r"reserved for the pause.*No server was paused") as caught:
        refit(slow, late, timeout_s=8.0)  # of which 6 seconds are for the fetch
    assert caught.value.failed[late.url] == "still fetching"
    assert "no answer" not in caught.value.failed.get(slow.url, "")
    assert not any(path == "/pause" for _, path in [*slow.requests, *late.requests])


def test_missing_server_is_named_and_none_is_paused(scripted):
    here, gone = scripted(vllm({})), ScriptedServer(vllm({}))
    gone.close()
    began = time.monotonic()
    fleet = fleet_of([here.url, gone.url], timeout_s=60)
    with pytest.raises(FleetError, match="ConnectError") as caught:
        fleet.refit("v1")
    assert time.monotonic() - began < 30
    assert list(caught.value.failed) == [gone.url]
    assert fleet.server_versions == {here.url: None}
    assert_only_queried(here)


@pytest.mark.parametrize(
    "answer",
    [
        [json_answer({"error": "EngineDeadError"}, "500 Internal Server Error")],
        [json_answer({"results": []})],
        [],
    ],
    ids=["a dead engine", "no ranks", "a closed connection"],
)
def test_version_of_a_server_with_failing_workers_is_unknown(scripted, answer):
    changes = {}
    server = scripted(vllm(changes))
    fleet = fleet_of([server.url], timeout_s=1.0)
    with pytest.raises(FleetError, match="/init_weight_transfer_engine"):
        fleet.refit("v1")
    assert fleet.server_versions == {server.url: None}
    changes["/collective_rpc"] = answer
    assert list(fleet.check()) == [server.url]
    assert fleet.server_versions == {}


def test_only_the_given_addresses_are_called(scripted, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    server = scripted(vllm({"/version": [json_answer({"version": "0.24.0"})]}))
    with pytest.raises(RefitConfigError, match=r"'0\.24\.0'"):
        refit(server)


def test_headers_reach_no_error(scripted):
    server = scripted(vllm({}))
    fleet = fleet_of([server.url], timeout_s=5, headers={"Authorization": "Bearer of-secrets"})
    with pytest.raises(FleetError) as caught:
        fleet.refit("v1")
    assert "of-secrets" not in str(caught.value)
    assert "of-secrets" not in repr(fleet)


def test_refit_async_runs_in_a_loop_and_excludes_another(scripted):
    server = scripted(vllm({"/version": [1.0, json_answer({"version": "0.24.0"})]}))
    fleet = fleet_of([server.url], timeout_s=20)

    async def refit_twice():
        with pytest.raises(RefitConfigError, match="await the asynchronous method"):
            fleet.refit("v1")
        task = asyncio.create_task(fleet.refit_async("v1"))
        while not server.requests:
            await asyncio.sleep(0.01)
        with pytest.raises(RefitConfigError, match="in progress"):
            await fleet.refit_async("v2")
        with pytest.raises(RefitConfigError, match=r"'0\.24\.0'"):
            await task

    asyncio.run(refit_twice())


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
        "http://[::1",
    ],
)
def test_addresses_with_more_than_a_host_and_a_port_are_refused(address):
    with pytest.raises(RefitConfigError, match="address"):
        fleet_of([address])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"addresses": []}, "no addresses"),
        ({"addresses": ["http://a:1", "http://a:1/"]}, "is repeated"),
        ({"pause_mode": "later"}, "'later'"),
        ({"timeout_s": 0}, "timeout_s 0"),
        ({"cleanup_timeout_s": -1}, "cleanup_timeout_s -1"),
        ({"init_info": {}}, "control_address is missing"),
        ({"init_info": {"control_address": "a:1", "transports": "nixl"}}, "'transports'"),
        ({"init_info": {"control_address": "a:1", "errors": "raise"}}, "'errors', which the fleet"),
        ({"init_info": {"control_address": "a:1", "timeout_s": 0}}, "timeout_s 0"),
    ],
)
def test_wrong_arguments_are_refused(arguments, named):
    usual = {"addresses": ["http://a:1"], "init_info": {"control_address": "a:1"}}
    with pytest.raises(RefitConfigError, match=named):
        RefitFleet(**{**usual, **arguments})


def test_version_without_a_name_is_refused():
    with pytest.raises(RefitConfigError, match="version_id"):
        fleet_of(["http://127.0.0.1:9"]).refit("")


def test_check_during_a_refit_does_not_change_what_the_refit_knows(scripted):
    changes = {}
    server = scripted(vllm(changes))
    fleet = fleet_of([server.url], timeout_s=20.0)
    assert fleet.check() == {}
    changes["/collective_rpc"] = [json_answer({}, "503 Service Unavailable")]
    with fleet._exclusive():
        assert list(fleet.check()) == [server.url]
        assert fleet.server_versions == {server.url: None}
    assert list(fleet.check()) == [server.url]
    assert fleet.server_versions == {}
