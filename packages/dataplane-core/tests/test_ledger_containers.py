"""Containers of the ledger: a mapping in parts, keys by position, rows in chunks.

Imports internals: the ledger shows neither the parts nor the sizes of its containers.
"""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dataplane_core.ledger.ordered_keys import OrderedKeys
from dataplane_core.ledger.parted_dict import PartedDict
from dataplane_core.ledger.rows import Row, Rows
from dataplane_core.ledger.sequence_set import SequenceSet

KEYS = st.one_of(st.integers(0, 400), st.text(max_size=2))


@given(
    st.lists(
        st.tuples(st.sampled_from(["set", "pop", "delete", "get"]), KEYS, st.integers()),
        max_size=80,
    )
)
def test_a_parted_dict_is_a_dict_without_order(operations):
    parted, model = PartedDict(), {}
    for name, key, value in operations:
        match name:
            case "set":
                parted[key] = model[key] = value
            case "pop":
                assert parted.pop(key) == model.pop(key, None)
            case "delete" if key in model:
                del parted[key], model[key]
            case _:
                assert parted.get(key, "none") == model.get(key, "none")
        assert (len(parted), key in parted) == (len(model), key in model)
    assert dict(parted) == model
    while not parted.free_entries(1):
        assert len(parted)
    assert (len(parted), list(parted)) == (0, [])


def test_parted_dict_is_freed_in_small_parts():
    parted = PartedDict()
    for number in range(10_000):
        parted[number] = parted[f"s{number}"] = None
    before = len(parted)
    while not parted.free_entries(100):
        assert before - len(parted) < 300
        before = len(parted)


class OrderedMachine(RuleBasedStateMachine):
    """Keys by position, and numbers that are their own position."""

    def __init__(self):
        super().__init__()
        self.keys, self.named, self.model = OrderedKeys(), OrderedKeys(), {}
        self.numbers, self.present = SequenceSet(), set()

    @rule(first=st.integers(0, 3_000), count=st.integers(1, 800), step=st.integers(1, 99))
    def put(self, first, count, step):
        for key in range(first, first + count):
            if key not in self.model:
                self.model[key] = key * step % 10
                self.keys.put(key, self.model[key])
                self.named.put(str(key), float(self.model[key]))
        self.numbers.add(range(first, first + count))
        self.present.update(range(first, first + count))

    @rule(first=st.integers(0, 3_000), count=st.integers(1, 800))
    def discard(self, first, count):
        gone = range(first, first + count)
        self.keys.discard(gone)
        self.named.discard(map(str, gone))
        self.numbers.discard(gone)
        self.present.difference_update(gone)
        for key in gone:
            self.model.pop(key, None)

    @rule(count=st.integers(1, 300))
    def take(self, count):
        first = sorted(self.model, key=lambda key: (self.model[key], key))[:count]
        assert self.keys.take(count) == first
        self.named.discard(map(str, first))
        for key in first:
            del self.model[key]
        first = sorted(self.present)[:count]
        assert self.numbers.take(count) == first
        self.present.difference_update(first)

    @invariant()
    def has_what_was_put(self):
        assert len(self.keys) == len(self.named) == len(self.model)
        assert all(key in self.keys for key in self.model)
        assert len(self.numbers) == len(self.present)

    def teardown(self):
        first = sorted(self.model, key=lambda key: (self.model[key], str(key)))
        assert self.named.take(len(first) + 1) == [str(key) for key in first]


TestOrdered = OrderedMachine.TestCase
TestOrdered.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


@given(st.sets(st.integers(0, 999)), st.integers(0, 1_100), st.integers(0, 300))
def test_page_of_rows_follows_the_order_of_puts(gone, start, limit):
    rows, numbers = Rows(), itertools.count(7)
    for number in range(1_000):
        rows.add(Row(f"s{number}", next(numbers), 0.0))
    for number in gone:
        rows.remove(rows[f"s{number}"])
    left = [f"s{number}" for number in range(1_000) if number not in gone]
    assert [row.sample_id for row in rows.page(start, limit)] == left[start : start + limit]
    assert [row.sample_id for chunk in rows.in_chunks() for row in chunk] == left == list(rows)
