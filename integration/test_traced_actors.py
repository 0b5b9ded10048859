"""`traced` on actors of somebody else's, on a real Ray."""

from __future__ import annotations

from typing import Any

import pytest
import ray

from observability import TracedHandle, inject, step_context, traced


class Counter:
    """An actor's class as a user writes it."""

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


def test_a_traced_method_is_called_with_and_without_a_carrier(counter: Any) -> None:
    assert ray.get(counter.add.remote(1), timeout=60) == (2, {})
    with step_context("run", 4, 3):
        added, facts = ray.get(counter.add.remote(1, 2, c=3, carrier=inject()), timeout=60)
    assert added == 6
    assert facts == {"rl.run_id": "run", "rl.step": 4, "rl.weight_version": 3}


def test_a_traced_handle_takes_the_context_along_also_through_another_actor(counter: Any) -> None:
    @ray.remote(num_cpus=0.1)
    def relay(handle: Any, carrier: dict[str, str]) -> Any:
        from observability import attached

        with attached(carrier):
            return ray.get(handle.add.remote(1))

    with step_context("run", 5, 5):
        _, facts = ray.get(relay.remote(TracedHandle(counter), inject()), timeout=60)
    assert facts["rl.step"] == 5


def test_ray_still_checks_the_arguments(counter: Any) -> None:
    for wrong in ({}, {"a": 1, "d": 2}):
        with pytest.raises(TypeError):
            counter.add.remote(**wrong)
    with pytest.raises(TypeError):
        counter.plain.remote(carrier={})


def test_coroutines_and_options_of_ray_stay(counter: Any) -> None:
    assert ray.get(counter.slow.remote(3, carrier=inject()), timeout=60) == 3
    first, second = counter.two.remote()
    assert ray.get([first, second], timeout=60) == [1, 2]
    assert ray.get(counter.plain.remote(), timeout=60) == "plain"
