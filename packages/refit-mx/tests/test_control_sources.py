"""The sources of P2pService: which are stored, for how long, and how many.

These tests use internals: times to the millisecond, and small bounds.
"""

import pytest

from refit_mx.control import sources
from refit_mx.control.records import Code, Refusal
from refit_mx.control.sources import READY, SILENT_AFTER_MS, STALE, Source, SourceTable


def source(worker="w", *, at_ms=0, nbytes=10, status=READY):
    return Source("id", worker, "m", 0, b"", b"x" * nbytes, status, at_ms)


def beat(table, worker, now_ms, status=READY, load=None):
    return table.update("id", worker, status=status, source_load=load, now_ms=now_ms)


def test_silent_source_is_stale_until_its_next_update():
    table = SourceTable()
    table.publish(source())
    assert table.ready(SILENT_AFTER_MS - 1) == 1
    assert table.ready(SILENT_AFTER_MS) == 0
    assert table.get("id", "w").status_at(SILENT_AFTER_MS) == STALE
    assert beat(table, "w", SILENT_AFTER_MS)
    assert table.ready(SILENT_AFTER_MS) == 1


def test_last_reported_load_is_retained():
    table = SourceTable()
    table.publish(source())
    assert beat(table, "w", 1, load=0.0)
    assert beat(table, "w", 2)
    assert table.get("id", "w").source_load == 0.0


def test_source_last_seen_comes_first():
    table = SourceTable()
    for n, worker in enumerate("abc"):
        table.publish(source(worker, at_ms=n))
    beat(table, "a", 9)
    assert [each.worker_id for each in table.all()] == ["a", "c", "b"]


def refused(call):
    with pytest.raises(Refusal) as refusal:
        call()
    assert refusal.value.code is Code.RESOURCE_EXHAUSTED


def test_silent_source_is_evicted_at_the_maximum(monkeypatch):
    monkeypatch.setattr(sources, "MAX_SOURCES", 2)
    table = SourceTable()
    table.publish(source("a"))
    table.publish(source("b", at_ms=5))
    refused(lambda: table.publish(source("c", at_ms=10)))
    table.publish(source("b", at_ms=SILENT_AFTER_MS - 1))
    table.publish(source("c", at_ms=SILENT_AFTER_MS))
    assert {each.worker_id for each in table.all()} == {"b", "c"}


def test_stored_bytes_are_bounded(monkeypatch):
    monkeypatch.setattr(sources, "MAX_BYTES", 100)
    table = SourceTable()
    table.publish(source("a", nbytes=60))
    refused(lambda: table.publish(source("b", nbytes=41)))
    table.publish(source("b", nbytes=40))
    table.publish(source("a", nbytes=50))
    table.publish(source("b", nbytes=50))
    refused(lambda: table.publish(source("b", nbytes=51)))
    table.publish(source("c", nbytes=100, at_ms=SILENT_AFTER_MS))
    assert [each.worker_id for each in table.all()] == ["c"]
