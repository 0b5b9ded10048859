"""Rows of TransferQueue's own clients whose indexes are reused while a call runs. No Ray.

Imports internals: the rows are behind TransferQueue's storage manager.
"""

import pytest
import torch
from packed_store import opened
from tensordict import TensorDict

from dataplane_core import MissingDataError
from dataplane_tq.directory import protocol as p
from dataplane_tq.directory.wire import Session

ROWS = [0, 1]


@pytest.fixture
def store():
    with opened(1 << 20) as store:
        yield store


def put(store, meta, **columns):
    data = TensorDict({name: torch.tensor(each) for name, each in columns.items()}, [len(ROWS)])
    return store.put("train", ROWS, data, meta, lambda cells: None)


def values(store, meta):
    columns = store.get("train", ROWS, list(meta), meta)
    return {name: column.tolist() for name, column in columns.items()}


def run_before(monkeypatch, kind, action):
    """Run an action before the next request of this kind; return a list that gets its result."""
    results = []
    send = Session.send

    def run_then_send(session, request, timeout_s=None):
        if isinstance(request, kind):
            monkeypatch.setattr(Session, "send", send)
            results.append(action())
        send(session, request, timeout_s)

    monkeypatch.setattr(Session, "send", run_then_send)
    return results


def reuse(store, cells):
    """Clear the rows and put other samples at their indexes; return the cells of these."""
    store.clear("train", ROWS, cells)
    return put(store, {}, x=[8, 9])


@pytest.mark.parametrize("kind", [p.BeginPut, p.CommitPut])
@pytest.mark.parametrize("name", ["x", "y"])
def test_put_writes_to_no_sample_that_reused_an_index(store, monkeypatch, kind, name):
    cells = put(store, {}, x=[1, 2])
    others = run_before(monkeypatch, kind, lambda: reuse(store, cells))
    with pytest.raises(MissingDataError, match="2 of 2 rows were cleared"):
        put(store, cells, **{name: [3, 4]})
    assert values(store, others[0]) == {"x": [8, 9]}
    with pytest.raises(MissingDataError):
        store.get("train", ROWS, ["x", "y"], others[0])


def test_put_accepts_a_concurrent_overwrite(store, monkeypatch):
    cells = put(store, {}, x=[1, 2])
    run_before(monkeypatch, p.CommitPut, lambda: put(store, cells, x=[5, 6]))
    assert values(store, put(store, cells, y=[3, 4])) == {"y": [3, 4]}


def test_clear_frees_no_sample_that_reused_an_index(store, monkeypatch):
    cells = put(store, {}, x=[1, 2])
    others = run_before(monkeypatch, p.Clear, lambda: reuse(store, cells))
    with pytest.raises(MissingDataError, match="2 of 2 rows were overwritten or reused"):
        store.clear("train", ROWS, cells)
    assert values(store, others[0]) == {"x": [8, 9]}


def test_clear_refuses_a_sample_without_the_fields_of_the_meta(store):
    cells = put(store, {}, x=[1, 2], y=[1, 2])
    store.clear("train", ROWS, cells)
    others = put(store, {}, x=[8, 9])
    for stale in (cells, {"y": cells["y"]}):
        with pytest.raises(MissingDataError, match="get the meta again"):
            store.clear("train", ROWS, stale)
    assert values(store, others) == {"x": [8, 9]}
