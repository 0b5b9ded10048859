"""Claims in a configured order, beyond its contract."""

from __future__ import annotations

import ledger_parts
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from ledger_parts import claim, claimed

from dataplane_core import ConfigError, InMemoryDataPlaneClient, InvalidRequestError
from dataplane_core.ledger import load_order


def by_priority(sample_id, tags):
    return tags["priority"]


def new_ledger(group_size=None):
    return ledger_parts.new_ledger(1000, group_size, order=by_priority)


def put(ledger, priorities):
    """Put samples, or change the priority of present ones."""
    tags = [{"priority": priority} for priority in priorities.values()]
    ledger_parts.put(ledger, list(priorities), tags=tags)


def lease(ledger, size, **options):
    """Claim; return the token and the sample ids."""
    result = claimed(ledger, size, **options)
    return result.token, [row.sample_id for row in result.rows]


some_priorities = st.dictionaries(
    st.sampled_from([f"s{i}" for i in range(12)]), st.integers(0, 1000), min_size=1
)


some_claim = st.tuples(st.integers(1, 4), st.sampled_from([("x",), ()]))


@given(steps=st.lists(st.one_of(some_priorities, some_claim, st.just("release")), max_size=12))
@example(
    [{"s0": 0, "s1": 1, "s2": 2}, (1, ("x",)), (1, ()), {"s1": 9}, "release", "release"],
)
def test_claim_takes_the_smallest_also_after_tags_changed(steps):
    """Claim from two queues, and release some claims after their tags have changed."""
    ledger, now, held = new_ledger(), {f"later {i}": 2000 + i for i in range(100)}, []
    put(ledger, now)
    for step in [*steps, (12, ("x",))]:
        if isinstance(step, dict):
            put(ledger, step)
            now |= step
        elif step == "release":
            if held:
                token, ids = held.pop(0)
                ledger.partition("p").release(token, ids)
        else:
            size, required = step
            taken = {sample_id for _, ids in held for sample_id in ids}
            token, ids = lease(ledger, size, required=required, lease_s=9.0)
            free = sorted(now[i] for i in now if i not in taken)
            assert [now[i] for i in ids] == free[:size]
            held += [(token, ids)] if ids else []


@pytest.mark.parametrize("group_size", [None, 2], ids=["samples", "groups"])
def test_released_sample_with_new_tags_has_a_new_position(group_size):
    ledger = new_ledger(group_size)
    size = group_size or 1
    first, second, third, fourth = ([f"p{i}_g{j}" for j in range(size)] for i in range(4))
    put(ledger, {sample_id: int(sample_id[1]) for sample_id in first + second + third + fourth})
    assert claim(ledger, size) == first  # the queue of claims for x has the others
    # The next claim requires no field, so it builds a second queue.
    token, ids = lease(ledger, size, required=(), lease_s=9.0)
    assert ids == second
    put(ledger, dict.fromkeys(second, 9))
    ledger.partition("p").release(token, second)
    assert claim(ledger, 3 * size) == third + fourth + second


@pytest.mark.parametrize("group_size", [None, 1], ids=["samples", "groups"])
def test_clearing_the_sample_that_broke_the_order_ends_the_error(group_size):
    cfg = {"enabled": True, "impl": "in_memory", "claim_order": f"{__name__}:by_priority"}
    with InMemoryDataPlaneClient(cfg) as client:
        client.register_partition("p", [], 3, ["a"], group_size)
        tags = [{"priority": place} for place in ("high", None, 1)]
        client.put_samples(["p0_g0", "p1_g0", "p2_g0"], "p", None, tags)
        for failing in ("p0_g0", "p1_g0"):
            with pytest.raises(InvalidRequestError, match=f"failed on sample '{failing}'"):
                client.claim_meta("p", "a", [], 1)
            client.clear_samples([failing], "p")
        assert client.claim_meta("p", "a", [], 1).sample_ids == ["p2_g0"]


@pytest.mark.parametrize("path", ["nowhere:f", "math:nothing", "math", "math:pi", ""])
def test_a_configuration_that_names_no_function_is_refused(path):
    with pytest.raises(ConfigError, match="claim_order"):
        load_order(path)
