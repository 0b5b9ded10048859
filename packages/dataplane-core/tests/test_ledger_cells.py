"""Shared cells are, for every sample, the same as separate cells."""

from __future__ import annotations

from itertools import count, repeat

from hypothesis import given
from hypothesis import strategies as st

from dataplane_core.declaration import PartitionDeclaration
from dataplane_core.ledger import Ledger, SharedCells

IDS = [f"s{number}" for number in range(6)]
FIELDS = ["a", "b", "c", "d"]


class Stores:
    """Two ledgers that get the same calls: one gets cells, the other shared cells."""

    def __init__(self):
        self.discarded = {"separate": [], "shared": []}
        self.ledgers = {name: Ledger(None, log.extend) for name, log in self.discarded.items()}
        for ledger in self.ledgers.values():
            ledger.register(PartitionDeclaration.checked("p", [], 0, ["t"]))
        self.pinned = {name: [] for name in self.ledgers}
        self.names = count()

    def put(self, ids, fields, layers):
        """Put fields in new columns; ``layers`` has the layer of each field."""
        put = next(self.names)
        used = sorted({layers[name] for name in fields})
        places = [tuple(10 * used.index(layer) + row for layer in used) for row in range(len(ids))]
        shared = {name: (f"{name}{put}", used.index(layers[name])) for name in fields}
        separate = {
            name: [(column, place[layer]) for place in places]
            for name, (column, layer) in shared.items()
        }
        cells = {
            "separate": separate,
            "shared": SharedCells(tuple(fields), zip(repeat(shared), places)),
        }
        for name, ledger in self.ledgers.items():
            ticket = ledger.begin_put("p", ids, dict.fromkeys(fields, "kind"))
            ledger.commit_put(ticket, cells[name], None)

    def rows(self, name):
        return self.ledgers[name].partition("p").rows

    def pin(self, ids):
        for name, ledger in self.ledgers.items():
            rows = [row for each in ids if (row := self.rows(name).get(each)) is not None]
            ledger.pin(rows)
            self.pinned[name].append(rows)

    def unpin(self):
        for name, ledger in self.ledgers.items():
            for rows in self.pinned[name]:
                ledger.unpin(rows)
            self.pinned[name].clear()

    def clear(self, ids):
        for ledger in self.ledgers.values():
            ledger.clear("p", ids, force=True)

    def cells(self, name):
        return {
            row.sample_id: [row.cell(field) for field in row.cells]
            for row in self.rows(name).values()
        }


some_ids = st.lists(st.sampled_from(IDS), min_size=1, unique=True)
puts = st.tuples(
    st.just("put"),
    some_ids,
    st.lists(st.sampled_from(FIELDS), unique=True),
    st.fixed_dictionaries({name: st.integers(0, 2) for name in FIELDS}),
)
others = st.one_of(
    st.tuples(st.just("pin"), some_ids),
    st.tuples(st.just("clear"), some_ids),
    st.tuples(st.just("unpin")),
)


@given(st.lists(st.one_of(puts, puts, others), max_size=12))
def test_shared_cells_equal_separate_cells(steps):
    stores = Stores()
    for name, *arguments in steps:
        getattr(stores, name)(*arguments)
        assert stores.cells("shared") == stores.cells("separate")
        assert sorted(stores.discarded["shared"]) == sorted(stores.discarded["separate"])


def test_samples_of_two_puts_share_one_mapping():
    stores = Stores()
    layers = dict.fromkeys(FIELDS, 0)
    stores.put(IDS, ["a", "b"], layers)
    stores.put(IDS[2:], ["b", "c"], layers)
    rows = stores.rows("shared")
    assert len({id(rows[each].cells) for each in IDS[:2]}) == 1
    assert len({id(rows[each].cells) for each in IDS[2:]}) == 1
