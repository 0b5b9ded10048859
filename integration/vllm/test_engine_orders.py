"""The refit engine with calls in any order: a call succeeds exactly if vLLM's session allows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from integration.vllm.in_process import Answers, answers, start, status
from integration.vllm.published import Trainer, checkpoint
from integration.vllm.tiny_model import save_tiny_model
from vllm import LLM
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from refit_mx import FencedError, PhaseError, RefitError


@dataclass
class Expected:
    """Expected state of a server with one rank.

    Attributes:
        serves: seed of the live weights; None while the server is fenced.
        session: vLLM's session is open.
        trainer: index of the trainer that the engine is connected to, or None.
        fetched: seed of the fetched version; None without a fetch, "failed" after a failed one.
    """

    serves: int | None = 0
    session: bool = False
    trainer: int | None = None
    fetched: int | str | None = None


class Driver:
    """A caller of vLLM that checks the state after each call.

    Args:
        llm: a vLLM with the weights of seed 0.
        trainers: trainers that have published seeds 0 and 1 as ``v0`` and ``v1``.
        patch: used to make the next install fail.
    """

    def __init__(self, llm: LLM, trainers: list[Trainer], patch: pytest.MonkeyPatch) -> None:
        self._llm = llm
        self._trainers = trainers
        self._patch = patch
        self.expected = Expected()

    def run(self, call: str) -> None:
        """Make a call, and check the resulting state."""
        name, _, argument = call.partition(" ")
        getattr(self, name)(*([int(argument)] if argument else []))
        reported, expected = status(self._llm), self.expected
        assert reported["session"] == expected.session, call
        assert reported["initialized"] == (expected.trainer is not None), call
        assert bool(reported["fenced"]) == (expected.serves is None), call
        state = {None: None, "failed": "failed"}.get(expected.fetched, "received")
        assert (reported["fetch"] or {"state": None})["state"] == state, call

    def init(self, trainer: int) -> None:
        self._llm.init_weight_transfer_engine(
            {"init_info": self._trainers[trainer].init_info(attempts=1)}
        )
        if trainer != self.expected.trainer:
            self.expected.fetched = None
        self.expected.trainer = trainer

    def start(self) -> None:
        if self.expected.session:
            with pytest.raises(RuntimeError, match="finish_weight_update"):
                self._llm.start_weight_update()
            return
        self._llm.start_weight_update()
        self.expected.session, self.expected.fetched = True, None

    def update(self, seed: int) -> None:
        info = {"update_info": {"version_id": f"v{seed}"}}
        if not self.expected.session:
            with pytest.raises(RuntimeError, match="start_weight_update must be called"):
                self._llm.update_weights(info)
        elif self.expected.trainer is None or seed == 9:
            with pytest.raises(RefitError):
                self._llm.update_weights(info)
            self.expected.session, self.expected.fetched = False, "failed"
        else:
            self._llm.update_weights(info)
            self.expected.fetched = seed

    def background(self, seed: int) -> None:
        info = {"update_info": {"version_id": f"v{seed}", "background": True}}
        if not self.expected.session:
            with pytest.raises(RuntimeError, match="start_weight_update must be called"):
                self._llm.update_weights(info)
            return
        self._llm.update_weights(info)
        while status(self._llm)["fetch"]["state"] == "running":
            pass
        failed = self.expected.trainer is None or seed == 9
        self.expected.fetched = "failed" if failed else seed

    def abort(self) -> None:
        if self.expected.session:
            self._llm.update_weights({"update_info": {"abort": True}})
            self.expected.fetched = None

    def finish(self) -> None:
        if not self.expected.session:
            with pytest.raises(RuntimeError, match="without a matching start_weight_update"):
                self._llm.finish_weight_update()
            return
        if self.expected.fetched == "failed":
            with pytest.raises(PhaseError, match=r"v\d has failed"):
                self._llm.finish_weight_update()
            self.expected.fetched = None
            return
        self._llm.finish_weight_update()
        if isinstance(self.expected.fetched, int):
            self.expected.serves = self.expected.fetched
        self.expected.session, self.expected.fetched = False, None

    def finish_badly(self) -> None:
        if not (self.expected.session and isinstance(self.expected.fetched, int)):
            return

        def fail(*_: object) -> None:
            raise MemoryError("no memory to pack into")

        with self._patch.context() as patch:
            patch.setattr(UnquantizedLinearMethod, "process_weights_after_loading", fail)
            with pytest.raises(FencedError, match="no memory"):
                self._llm.finish_weight_update()
        self.expected.serves, self.expected.fetched = None, None

    def release(self) -> None:
        if self.expected.session:
            with pytest.raises(RuntimeError):
                self._llm.collective_rpc("shutdown_weight_transfer_engine")
            return
        self._llm.collective_rpc("shutdown_weight_transfer_engine")
        self.expected.trainer = self.expected.fetched = None

    def end(self) -> None:
        """Refit to seed 0, like a client that does not know the earlier calls."""
        if status(self._llm)["session"]:
            self.run("abort")
            self.run("finish")
        for call in ("init 0", "start", "update 0", "finish"):
            self.run(call)


CALLS = [
    *("init 0", "init 1", "start", "start", "update 0", "update 1", "update 9"),
    *("background 1", "background 9", "abort", "finish", "finish", "finish_badly", "release"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [save_tiny_model(folder / str(seed), seed=seed) for seed in range(2)]


@pytest.fixture(scope="module")
def references(folders: list[Path]) -> list[Answers]:
    return [answers(start(folder)) for folder in folders]


@pytest.fixture(scope="module")
def trainers(folders: list[Path]) -> Iterator[list[Trainer]]:
    with Trainer("tiny") as first, Trainer("tiny", slots=2) as second:
        for trainer in (first, second):
            for seed in range(2):
                trainer.publish(f"v{seed}", checkpoint(folders[seed]))
        yield [first, second]


@pytest.fixture(scope="module")
def run(
    folders: list[Path], references: list[Answers], trainers: list[Trainer]
) -> Callable[[list[str]], None]:
    llm = start(folders[0])

    def run_calls(calls: list[str]) -> None:
        with pytest.MonkeyPatch.context() as patch:
            driver = Driver(llm, trainers, patch)
            driver.end()
            for call in calls:
                driver.run(call)
            if driver.expected.serves is not None:
                assert answers(llm) == references[driver.expected.serves]
            driver.end()
            assert answers(llm) == references[0]

    return run_calls


@given(calls=st.lists(st.sampled_from(CALLS), max_size=12))
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_order_of_calls_serves_one_version(
    run: Callable[[list[str]], None], calls: list[str]
) -> None:
    torch.manual_seed(0)
    run(calls)


@pytest.mark.parametrize(
    "calls",
    [
        ["start", "update 1", "finish_badly", "start", "update 1", "finish"],
        ["start", "update 1", "finish_badly", "update 9", "start"],
        ["start", "background 9", "finish", "finish"],
        ["release", "start", "update 1", "start", "init 1", "update 1", "finish"],
        ["start", "update 1", "init 1", "finish"],
    ],
)
def test_next_update_works_after_a_failure(
    run: Callable[[list[str]], None], calls: list[str]
) -> None:
    run(calls)
