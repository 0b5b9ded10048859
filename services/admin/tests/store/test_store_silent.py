"""A silent PostgreSQL fails blocked requests, and is used again afterwards.

These tests use the store, whose deadlines are half a minute in a service.
So internals are imported.
"""

import os
import signal
import time
from contextlib import contextmanager

import psutil
import pytest

from dataplane_admin.store import (
    Batch,
    Store,
    StoreUnavailable,
    answer_deadline,
    engine,
)

ANSWER_S, CONNECT_S = 1.0, 2
NOISE_S = 10.0
"""Additional seconds on a busy machine."""


@contextmanager
def stopped(server):
    processes = [server, *server.children(recursive=True)]
    for process in processes:
        os.kill(process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            os.kill(process.pid, signal.SIGCONT)


def test_a_stopped_postgresql_fails_requests_at_their_deadline(postgresql, monkeypatch):
    monkeypatch.setattr(answer_deadline, "ANSWER_S", ANSWER_S)
    monkeypatch.setattr(engine, "_CONNECT_S", CONNECT_S)
    with Store.open(postgresql.make(empty=False)) as store:
        store.write(Batch(), timeout_s=30)
        assert store.runs() == []
        with stopped(psutil.Process(postgresql.process.pid)):
            began = time.monotonic()
            with pytest.raises(StoreUnavailable, match="cannot read the database"):
                store.runs()
            with pytest.raises(StoreUnavailable, match="cannot write to the database"):
                store.submit(Batch()).result(60)
            assert time.monotonic() - began < 2 * (ANSWER_S + CONNECT_S) + NOISE_S
        assert store.runs() == []
        store.write(Batch(), timeout_s=30)
