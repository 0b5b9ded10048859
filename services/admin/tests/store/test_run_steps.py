"""Ranges of a run contain every step once, and name existing steps."""

import hashlib
import os

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


@given(st.lists(st.integers(1, 10**6), max_size=40), st.integers(1, 60))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_ranges_contain_every_step_once(shared, otlp, lengths, count):
    run = os.urandom(8).hex()
    ids = [hashlib.md5(f"{run}{step}".encode()).digest() for step in range(len(lengths))]
    lasted = {trace_id.hex(): seconds for trace_id, seconds in zip(ids, lengths, strict=True)}
    if ids:
        shared.send(
            *(
                otlp.trace(trace_id, run=run, step=step, seconds=seconds, failed=step % 7 == 3)
                for step, (trace_id, seconds) in enumerate(zip(ids, lengths, strict=True))
            )
        )
    answer = shared.get("run/steps", run=run, ranges=count)
    ranges = answer["ranges"]
    assert answer["steps"] == len(ids)
    assert len(ranges) == min(count, len(ids))
    sizes = [each["steps"] for each in ranges]
    assert sum(sizes) == len(ids)
    assert not sizes or max(sizes) - min(sizes) <= 1
    assert sum(each["failed"] for each in ranges) == sum(step % 7 == 3 for step in range(len(ids)))
    expected_first = 0
    for each in ranges:
        assert each["first_step"] == expected_first
        expected_first = each["last_step"] + 1
        inside = lengths[each["first_step"] : expected_first]
        assert lasted[each["slowest_trace"]] == each["max_s"] == max(inside)
        assert lasted[each["median_trace"]] == each["median_s"]
        assert sum(seconds < each["median_s"] for seconds in inside) <= len(inside) // 2
        assert sum(seconds > each["median_s"] for seconds in inside) <= len(inside) // 2
