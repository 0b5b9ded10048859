"""The ledger against a naive model."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule
from ledger_parts import FIELDS, nbytes, new_ledger

from dataplane_core import LeaseLostError, SamplesLeasedError, TagFilter
from dataplane_core.ledger import ClaimRequest
from dataplane_core.ledger.actions import end_claim, reset_consumption
from dataplane_core.ledger.inspect import claims
from dataplane_core.ledger.scan import scan

IDS = [f"p{prompt}_g{place}" for prompt in range(3) for place in range(2)]


class LedgerMachine(RuleBasedStateMachine):
    """Every sample is in one state, and claimed samples were ready and open."""

    leases = Bundle("leases")

    def __init__(self):
        super().__init__()
        self.discarded = []
        self.ledger = new_ledger(discard=self.discarded.extend, measure=nbytes)
        self.now = 0.0
        self.written = {}
        self.put_total = 0
        self.cleared = 0
        self.where = {"a": {}, "b": {}}
        self.acknowledged_by = {}
        self.new = set()
        self.pinned = []

    @rule(
        ids=st.sets(st.sampled_from(IDS)),
        fields=st.sets(st.sampled_from(FIELDS)),
        size=st.integers(0, 9),
    )
    def put(self, ids, fields, size):
        self.put_under(None, ids, fields, size)

    @rule(lease=leases, ids=st.sets(st.sampled_from(IDS), min_size=1), size=st.integers(0, 9))
    def put_under_a_claim(self, lease, ids, size):
        task, token, _, got = lease
        places = self.where[task]

        def may_write(sample_id):
            place = places.get(sample_id, "open")
            if place == "acknowledged":
                return self.acknowledged_by[task, sample_id] == token
            return place == token or (place == "open" and sample_id not in got)

        if token is None or (token in places.values() and all(map(may_write, ids))):
            self.put_under(token, ids, {"y"}, size)
        else:
            with pytest.raises(LeaseLostError):
                self.put_under(token, ids, {"y"}, size)

    def put_under(self, token, ids, fields, size):
        names = sorted(ids)
        cells = {
            field: [(field, name, size + place) for place, name in enumerate(names)]
            for field in fields
        }
        ticket = self.ledger.begin_put("p", names, dict.fromkeys(fields, "torch.int64"), token)
        sizes = {field: nbytes(column) for field, column in cells.items()}
        self.ledger.commit_put(ticket, cells, None, nbytes=sizes)
        for sample_id in ids:
            if sample_id not in self.written:
                self.written[sample_id] = set()
                self.put_total += 1
                for task in self.where.values():
                    task[sample_id] = "open"
            self.written[sample_id] |= fields

    @rule(ids=st.sets(st.sampled_from(IDS), min_size=1), new=st.booleans())
    def tag(self, ids, new):
        ids &= self.written.keys()
        ticket = self.ledger.begin_put("p", sorted(ids), {})
        self.ledger.commit_put(ticket, {}, [{"new": new}] * len(ids))
        self.new = self.new | ids if new else self.new - ids

    @rule(ids=st.sets(st.sampled_from(IDS)))
    def give_up_a_put(self, ids):
        self.ledger.abort_put(self.ledger.begin_put("p", sorted(ids), {"z": "torch.bool"}))

    @rule(
        target=leases,
        task=st.sampled_from(["a", "b"]),
        required=st.sets(st.sampled_from(FIELDS)),
        size=st.integers(1, 4),
        lease=st.sampled_from([None, 2.0]),
        seed=st.sampled_from([None, 7]),
        newest=st.booleans(),
        blocking=st.booleans(),
    )
    def claim(self, task, required, size, lease, seed, newest, blocking):
        where = (TagFilter("new", "==", True),) if newest else ()
        request = ClaimRequest(
            *(task, tuple(sorted(required)), size),
            lease_s=lease,
            seed=seed,
            where=where,
            blocking=blocking,
        )
        places = {
            sample_id: place
            for sample_id, place in self.where[task].items()
            if sample_id in self.new or not newest
        }
        open_rows = {sample_id for sample_id, place in places.items() if place == "open"}
        ready = {sample_id for sample_id in open_rows if required <= self.written[sample_id]}
        leased = any(place not in ("open", "acknowledged") for place in places.values())
        claimed = self.ledger.partition("p").claim(request, self.now)
        if blocking and len(ready) < size and (ready < open_rows or (leased and not ready)):
            assert claimed is None
            return task, None, self.now, []
        assert claimed is not None
        got = [row.sample_id for row in claimed.rows]
        assert set(got) <= ready
        assert len(got) == min(size, len(ready)) == len(set(got))
        for sample_id in got:
            self.where[task][sample_id] = "acknowledged" if lease is None else claimed.token
            self.acknowledged_by[task, sample_id] = None
        return task, claimed.token, self.now + 2.0, got

    @rule(
        lease=leases,
        how=st.sampled_from(["acknowledge", "release", "renew"]),
        subset=st.sets(st.sampled_from(IDS)),
    )
    def call_on_lease(self, lease, how, subset):
        task, token, _, got = lease
        got = [sample_id for sample_id in got if sample_id in subset] or got
        alive = token is not None and all(self.where[task].get(i) == token for i in got)
        partition = self.ledger.partition("p")

        def act():
            if how == "renew":
                # The deadline stays the same, so that the model need not follow it.
                partition.renew(
                    token, got, partition.leases[token].deadline - 2.0 if alive else 0.0
                )
            else:
                getattr(partition, how)(token, got)

        if alive:
            act()
            if how != "renew":
                place = "acknowledged" if how == "acknowledge" else "open"
                self.where[task].update(dict.fromkeys(got, place))
                self.acknowledged_by.update(((task, sample_id), token) for sample_id in got)
        else:
            with pytest.raises(LeaseLostError):
                act()

    @rule(task=st.sampled_from(["a", "b"]), ids=st.sets(st.sampled_from(IDS)))
    def reset(self, task, ids):
        partition, places = self.ledger.partition("p"), self.where[task]
        if any(places.get(each, "open") not in ("open", "acknowledged") for each in ids):
            with pytest.raises(SamplesLeasedError):
                reset_consumption(partition, task, sorted(ids))
            return
        acknowledged = [each for each in sorted(ids) if places.get(each) == "acknowledged"]
        assert reset_consumption(partition, task, sorted(ids)) == acknowledged
        places.update(dict.fromkeys(acknowledged, "open"))

    @rule(lease=leases, expired_only=st.booleans())
    def end_a_claim(self, lease, expired_only):
        task, token, _, _ = lease
        partition = self.ledger.partition("p")
        if token not in partition.leases:
            return
        name, held = partition.leases[token].name, set(partition.leases[token].rows)
        if expired_only and partition.leases[token].deadline > self.now:
            with pytest.raises(SamplesLeasedError):
                end_claim(partition, name, self.now, expired_only=True)
            return
        assert end_claim(partition, name, self.now, expired_only=expired_only) == len(held)
        assert end_claim(partition, name, self.now, expired_only=False) == 0
        self.where[task].update(dict.fromkeys(held, "open"))

    @rule(step=st.floats(0.0, 3.0))
    def time_passes(self, step):
        self.now += step
        before = dict(self.ledger.partition("p").leases)
        self.ledger.expire(self.now)
        for token, lease in before.items():
            if lease.deadline <= self.now:
                for places in self.where.values():
                    for sample_id, place in places.items():
                        if place == token:
                            places[sample_id] = "open"

    @rule(ids=st.sets(st.sampled_from(IDS)), force=st.booleans())
    def clear(self, ids, force):
        leased = any(
            places.get(sample_id, "open") not in ("open", "acknowledged")
            for places in self.where.values()
            for sample_id in ids
        )
        if leased and not force:
            with pytest.raises(SamplesLeasedError):
                self.ledger.clear("p", sorted(ids), force=False)
            return
        self.ledger.clear("p", sorted(ids), force=force)
        for sample_id in ids & self.written.keys():
            del self.written[sample_id]
            self.new.discard(sample_id)
            self.cleared += 1
            for places in self.where.values():
                del places[sample_id]

    @rule(ids=st.sets(st.sampled_from(IDS)))
    def start_reading(self, ids):
        rows = [self.ledger.partition("p").rows[i] for i in ids & self.written.keys()]
        self.ledger.pin(rows)
        self.pinned.append(rows)

    @rule()
    def end_reading(self):
        if self.pinned:
            self.ledger.unpin(self.pinned.pop(0))

    @invariant()
    def every_sample_is_counted_in_one_place(self):
        for task, places in self.where.items():
            counts = self.ledger.partition("p").counts(task, ["x"])
            assert counts.put == self.put_total
            assert counts.cleared == self.cleared
            assert counts.acknowledged == sum(place == "acknowledged" for place in places.values())
            assert counts.ready == sum(
                place == "open" and "x" in self.written[sample_id]
                for sample_id, place in places.items()
            )
            assert counts.put == (
                counts.ready
                + counts.not_ready
                + counts.leased
                + counts.acknowledged
                + counts.cleared
            )

    @invariant()
    def bytes_by_field_are_those_of_the_cells(self):
        partition = self.ledger.partition("p")
        for field in FIELDS:
            cells = [row.cells[field] for row in partition.rows.values() if field in row.cells]
            assert partition.samples.sizes.of(field, len(cells)) == nbytes(cells)
            assert partition.samples.field_counts.get(field, 0) == len(cells)

    @invariant()
    def the_oldest_unclaimed_sample_is_the_one_put_first(self):
        partition = self.ledger.partition("p")
        for name, places in self.where.items():
            oldest = next((each for each in partition.rows if places[each] == "open"), None)
            row = partition.tasks[name].oldest_unclaimed(partition.rows)
            assert (row and row.sample_id) == oldest

    @invariant()
    def scan_agrees_with_the_states(self):
        partition = self.ledger.partition("p")
        page = scan(partition, 0, 10)
        code = {"open": 0, "acknowledged": 3}
        expected = [code.get(self.where[task][each], 2) for each in partition.rows for task in "ab"]
        assert (page.tasks, list(page.states)) == (("a", "b"), expected)
        written = [field in self.written[each] for each in partition.rows for field in page.fields]
        assert list(page.written) == written

    @invariant()
    def claims_hold_what_is_leased(self):
        partition = self.ledger.partition("p")
        held = {"a": 0, "b": 0}
        for claim in claims(partition, self.now):
            held[claim.task] += claim.samples
        for task, places in self.where.items():
            assert held[task] == sum(
                place not in ("open", "acknowledged") for place in places.values()
            )

    @invariant()
    def what_is_being_read_is_not_discarded(self):
        held = {id(cell) for rows in self.pinned for row in rows for cell in row.cells.values()}
        assert not held & {id(cell) for cell in self.discarded}

    def teardown(self):
        for rows in self.pinned:
            self.ledger.unpin(rows)
        self.ledger.clear("p", None, force=True)
        assert len({id(cell) for cell in self.discarded}) == len(self.discarded)


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=150, stateful_step_count=40)
