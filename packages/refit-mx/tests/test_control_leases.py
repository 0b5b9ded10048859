"""Leases of a client, against a real server in this process."""

import contextlib
import threading
import time

import pytest
from control_clients import TIMEOUT_S, TRAINER, can_read, publish, shard, until

from refit_mx import (
    ControlClient,
    Deadline,
    EmbeddedControlServer,
    LeaseLostError,
    VersionLeasedError,
    VersionNotReadyError,
)
from refit_mx.control import Heartbeat, SqliteStore, VersionState


def test_concurrent_deletions_keep_leased_shards(server):
    """Check that all shards of a version exist while a lease on it is held."""
    rounds, receivers = 15, 4
    crossed = []
    go = threading.Barrier(receivers + 1)

    def receive(name):
        with ControlClient(server.address) as client:
            for n in range(rounds):
                go.wait(TIMEOUT_S)
                with contextlib.suppress(VersionNotReadyError), client.lease(f"v{n}", name):
                    slots = server.plane.call(
                        lambda state, _, n=n: list(state.ledger.shards.get(f"v{n}", {}))
                    )
                    if len(slots) != 2:
                        crossed.append((n, name, slots))
                go.wait(TIMEOUT_S)

    threads = [threading.Thread(target=receive, args=(f"g{n}",)) for n in range(receivers)]
    for thread in threads:
        thread.start()
    with ControlClient(server.address) as client:
        client.register_worker("w", TRAINER, "m", ttl_s=60)
        for n in range(rounds):
            client.create_version("m", ("a", "b"), idempotency_key=f"{n}", version_id=f"v{n}")
            for slot in ("a", "b"):
                client.create_shard(shard(f"v{n}", slot))
            go.wait(TIMEOUT_S)
            client.delete_version(f"v{n}")
            for slot in ("a", "b"):
                until(lambda slot=slot, n=n: deleted(client, f"v{n}", slot))
            go.wait(TIMEOUT_S)
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert crossed == []


def deleted(client, uid, slot):
    with contextlib.suppress(VersionLeasedError):
        return client.delete_shard(uid, slot, "w") or True
    return False


def test_lease_is_renewed_while_it_is_held(server, client):
    uid = publish(client)
    with client.lease(uid, "g", ttl_s=3) as lease:
        first = lease._until
        until(lambda: lease._until > first + 1)
        lease.check()
        assert client.lease(uid, "g", ttl_s=3).lease_id == lease.lease_id
    with pytest.raises(LeaseLostError, match="released"):
        lease.check()
    assert lease.left_s == 0
    assert server.plane.counts().leases == 0
    lease.close()


def test_lease_unknown_to_the_control_plane_is_lost(server, client):
    uid = publish(client)
    with client.lease(uid, "g", ttl_s=6) as lease:
        lease.check()
        server.plane.call(
            lambda state, now_ms: state.delete_lease(uid, lease.lease_id, "g", now_ms=now_ms)
        )
        until(lambda: not lease.left_s)
        # The lease was granted again under another id; in between, the version could be released.
        with pytest.raises(LeaseLostError, match="expired before it was renewed"):
            lease.check()


def test_lease_on_a_deleted_version_is_lost(server, client):
    uid = publish(client)
    with client.lease(uid, "g", ttl_s=6) as lease:

        def end(state, now_ms):
            state.delete_lease(uid, lease.lease_id, "g", now_ms=now_ms)
            state.delete_version(uid, now_ms=now_ms)

        server.plane.call(end)
        until(lambda: not lease.left_s)
        with pytest.raises(LeaseLostError, match="needs READY"):
            lease.check()


def test_lease_lasts_its_time_to_live_without_a_control_plane(client, server):
    uid = publish(client)
    started = time.monotonic()
    with client.lease(uid, "g", ttl_s=2) as lease:
        server.close()
        lease.check()
        until(lambda: not lease.left_s)
        assert time.monotonic() - started >= 2
        with pytest.raises(LeaseLostError, match="not renewed for 2 s"):
            lease.check()


def test_limit_of_the_first_call_is_not_that_of_renewals(client, monkeypatch):
    uid = publish(client)
    timeouts_s = []
    call = client._connection.call

    def record(method, request, *, timeout_s):
        timeouts_s.append(timeout_s)
        return call(method, request, timeout_s=timeout_s)

    monkeypatch.setattr(client._connection, "call", record)
    with client.within(Deadline(5, "lease")).lease(uid, "g", ttl_s=3):
        until(lambda: len(timeouts_s) > 1)
    assert 1 < timeouts_s[0] <= 5
    assert timeouts_s[1] == 1


def test_lease_and_heartbeat_outlast_a_restart(tmp_path, port):
    path = tmp_path / "state.db"
    first = EmbeddedControlServer(port=port, store=SqliteStore(path))
    with (
        ControlClient(first.address, rpc_timeout_s=2.0) as client,
        Heartbeat(client, "w", TRAINER, "m", ttl_s=20, on_sigterm=False),
    ):
        uid = publish(client)
        with client.lease(uid, "g", ttl_s=20) as lease:
            first.close()
            with EmbeddedControlServer(port=port, store=SqliteStore(path)) as second:
                until(lambda: can_read(client, uid))
                worker = second.plane._state.ledger.workers["w"]
                renewed = lease._until, worker.expires_at_ms
                until(lambda: lease._until > renewed[0] and worker.expires_at_ms > renewed[1])
                lease.check()
                assert client.get_version(uid).state is VersionState.READY
                assert second.plane.counts().leases == 1
