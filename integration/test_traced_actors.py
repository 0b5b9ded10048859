"""`traced` on a user's actors, on a real Ray."""

from __future__ import annotations

from typing import Any

import pytest
import ray

from observability import TracedHandle, inject, step_context, traced


class Counter:
    """A user's actor class."""

    @traced
    def add(self, a: int, b: int = 1, *, c: int = 0) -> tuple[int, dict[str, Any]]:
        from dataplane_core import telemetry

        return a + b + c, telemetry.step_facts()

    @traced(bucket="productive")
    async def slow(self, a: int) -> int:
        return a

    @traced
    @ray.method(num_returns=2)
    def two(self) -> tuple[int, int]:
        return 1, 2

    def plain(self) -> str:
        return "plain"


@pytest.fixture
def counter(cluster: None) -> Any:
    handle = ray.remote(Counter).options(num_cpus=0.1).remote()
    yield handle
    ray.kill(handle)


def test_traced_method_works_with_and_without_a_carrier(counter: Any) -> None:
    assert ray.get(counter.add.remote(1), timeout=180) == (2, {})
    with step_context("run", 4, 3):
        added, facts = ray.get(counter.add.remote(1, 2, c=3, carrier=inject()), timeout=180)
    assert added == 6
    assert facts == {"rl.run_id": "run", "rl.step": 4, "rl.weight_version": 3}


def test_traced_handle_passes_the_context_through_a_task(counter: Any) -> None:
    @ray.remote(num_cpus=0.1)
    def relay(handle: Any, carrier: dict[str, str]) -> Any:
        from observability import attached

        with attached(carrier):
            return ray.get(handle.add.remote(1))

    with step_context("run", 5, 5):
        _, facts = ray.get(relay.remote(TracedHandle(counter), inject()), timeout=180)
    assert facts["rl.step"] == 5


def test_ray_still_checks_the_arguments(counter: Any) -> None:
    for wrong in ({}, {"a": 1, "d": 2}):
        with pytest.raises(TypeError):
            counter.add.remote(**wrong)
    with pytest.raises(TypeError):
        counter.plain.remote(carrier={})


def test_coroutines_and_ray_options_keep_working(counter: Any) -> None:
    assert ray.get(counter.slow.remote(3, carrier=inject()), timeout=180) == 3
    first, second = counter.two.remote()
    assert ray.get([first, second], timeout=180) == [1, 2]
    assert ray.get(counter.plain.remote(), timeout=180) == "plain"
