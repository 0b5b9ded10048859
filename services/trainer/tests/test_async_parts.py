"""Parts of an asynchronous run, in situations that a complete run cannot produce.

So internals are imported.
"""

from __future__ import annotations

import copy
import itertools
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane_core import InMemoryDataPlaneClient
from grpo_trainer.errors import WorkerError
from grpo_trainer.policy.loss import grpo_loss, token_logprobs
from grpo_trainer.rollout import latency
from grpo_trainer.rollout.generator import required_versions
from grpo_trainer.rollout.latency import SimulatedLatency
from grpo_trainer.rollout.prompts import Prompt, PromptRecord, PromptStream
from grpo_trainer.rollout.remote_generation import StreamingGeneration
from grpo_trainer.rollout.sampling import sample_responses
from grpo_trainer.rollout.weight_gate import WeightGate
from grpo_trainer.rollout.worker import version_spans
from grpo_trainer.run.generator_fleet import GeneratorFleet
from grpo_trainer.run.processes import GeneratorActors
from grpo_trainer.run.prompt_feed import PromptFeed

WAIT_S = 20.0


@settings(max_examples=8)
@given(st.integers(0, 5), st.integers(0, 99))
def test_a_response_cut_by_new_weights_continues_under_them(network, tokenizer, change_at, seed):
    old, new = copy.deepcopy(network), copy.deepcopy(network)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.mul_(1.5)
    rows = [torch.tensor([3, 4, 5]), torch.tensor([6])]
    model = copy.deepcopy(old)
    drawn = 0

    def before_token(so_far):
        nonlocal drawn
        drawn += 1
        if drawn == change_at + 1:
            model.load_state_dict(new.state_dict())
            return True
        return False

    responses = sample_responses(
        model,
        tokenizer,
        rows,
        max_new_tokens=[6, 6],
        temperature=1.0,
        generator=torch.Generator().manual_seed(seed),
        before_token=before_token,
    )
    for row, response in zip(rows, responses, strict=True):
        complete = torch.cat([row, response.token_ids])[None]
        lengths = torch.tensor([complete.shape[1]])
        with torch.no_grad():
            scored = [
                token_logprobs(each, complete, lengths, temperature=1.0)[0, len(row) :]
                for each in (old, new)
            ]
        expected = torch.cat([scored[0][:change_at], scored[1][change_at:]])
        torch.testing.assert_close(response.logprobs, expected, atol=1e-4, rtol=1e-4)


@given(st.lists(st.sampled_from("abc"), max_size=12))
def test_version_spans_cover_every_token_once(versions):
    spans = version_spans(versions)
    assert [span["version"] for span in spans for _ in range(span["start"], span["end"])] == (
        versions
    )
    assert all(
        first["end"] == second["start"] and first["version"] != second["version"]
        for first, second in itertools.pairwise(spans)
    )


def test_weights_are_replaced_while_no_thread_uses_them():
    gate, inside = WeightGate(), 0
    lock, stop = threading.Lock(), threading.Event()

    def use():
        nonlocal inside
        while not stop.is_set():
            with gate.using():
                for _ in range(3):
                    with lock:
                        inside += 1
                    with lock:
                        inside -= 1
                    gate.pause()

    with ThreadPoolExecutor(3) as pool:
        users = [pool.submit(use) for _ in range(3)]
        for _ in range(50):
            with gate.replacing(WAIT_S):
                assert inside == 0
        stop.set()
        for user in users:
            user.result(WAIT_S)


def test_weights_in_use_are_not_replaced_after_the_deadline():
    gate = WeightGate()
    with gate.using():
        message = r"still in use after 0\.05 s: 1 calls"
        with pytest.raises(WorkerError, match=message), gate.replacing(0.05):
            raise AssertionError("replaced weights in use")
        assert not gate.pause()  # the failed replacement blocks no user
    with gate.replacing(WAIT_S):
        pass


@given(
    st.lists(st.floats(-3, 0), min_size=1, max_size=6),
    st.lists(st.floats(-3, 0), min_size=6, max_size=6),
    st.lists(st.floats(-3, 0), min_size=6, max_size=6),
    st.floats(0.5, 3),
    st.floats(-2, 2),
)
def test_stale_tokens_are_weighted_by_the_truncated_ratio(now, prev, drawn, cap, advantage):
    width = len(now)
    logprobs = torch.tensor([now], dtype=torch.float64, requires_grad=True)
    proximal, behavior = (torch.tensor([each[:width]]).double() for each in (prev, drawn))
    sums = grpo_loss(
        logprobs,
        proximal,
        torch.tensor([advantage], dtype=torch.float64),
        torch.ones(1, width),
        clip_low=0.2,
        clip_high=0.28,
        behavior_logprobs=behavior,
        max_importance_ratio=cap,
    )
    ratio = (logprobs.detach() - proximal).exp()
    weight = (proximal - behavior).exp().clamp(max=cap)
    clipped = ratio.clamp(0.8, 1.28)
    expected = -(torch.minimum(ratio * advantage, clipped * advantage) * weight).sum()
    torch.testing.assert_close(sums.loss.detach(), expected)
    torch.testing.assert_close(sums.importance, weight.sum())


def test_weights_are_replaced_during_a_pause():
    gate, done = WeightGate(), threading.Event()

    def replace():
        with gate.replacing(WAIT_S):
            pass
        done.set()

    with gate.using():
        assert not gate.pause(0.0)
        thread = threading.Thread(target=replace)
        thread.start()
        replaced = False
        deadline = time.monotonic() + WAIT_S
        while not replaced and time.monotonic() < deadline:
            replaced = gate.pause(0.01)
        assert replaced
        assert done.wait(WAIT_S)
        assert not gate.pause(0.0)
    thread.join(WAIT_S)


def test_simulated_latency_is_spread_over_the_tokens(monkeypatch):
    now_s = 100.0
    monkeypatch.setattr(latency.time, "perf_counter", lambda: now_s)
    simulated = SimulatedLatency(median_s=8.0, sigma=0.0)
    pace = simulated.pace(0, budgets=[4, 2], prefix_lengths=[0, 0])
    assert [pace.ahead_s(drawn) for drawn in range(5)] == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert pace.ahead_s() == 8.0
    now_s = 105.0
    assert [pace.ahead_s(drawn) for drawn in (2, 3)] == [0.0, 1.0]
    continued = simulated.pace(0, budgets=[4, 2], prefix_lengths=[3, 1])
    assert continued.ahead_s() == 2.0
    assert simulated.pace(0, budgets=[4], prefix_lengths=[4]).ahead_s() == 0.0
    assert simulated.pace(0, budgets=[0], prefix_lengths=[0]).ahead_s() == 8.0


class Worker:
    """Stand-in for the actor calls of a generation worker; its answer has the positions sent."""

    def call(self, name, method, data, **options):
        return {
            "positions": data.get("positions"),
            "journal": {"continued_tokens": 3, "seconds": 1},
        }


def test_a_row_is_recorded_for_the_one_prompt_that_begins_it():
    generation = StreamingGeneration(None, timeout_s=1.0)
    generation._calls = Worker()
    data = {
        "input_ids": torch.tensor([[1, 2, 3, 0], [1, 2, 8, 9], [1, 7, 0, 0], [4, 5, 0, 0]]),
        "input_lengths": torch.tensor([3, 4, 2, 2]),
    }
    # The prompts at 12 and 13 are equal, and 15 begins like 14.
    prompts = {11: [1, 2], 12: [4], 13: [4], 14: [1, 7], 15: [1, 7, 6]}
    assert generation.generate(data, greedy=False)["positions"] is None
    with generation.recorded(prompts) as use:
        assert generation.generate(data, greedy=False)["positions"] == [11, 11, 14, None]
        assert generation.generate(data, greedy=True)["positions"] is None
        generation.generate(data, greedy=False)
        with ThreadPoolExecutor(1) as pool:  # another rollout, such as a validation
            other = pool.submit(generation.generate, data, greedy=False)
            assert other.result(WAIT_S)["positions"] is None
    assert (use.continued_tokens, use.seconds) == (6, 2)
    assert generation.generate(data, greedy=False)["positions"] is None


def test_simulated_latency_has_its_median_and_a_tail():
    simulated = SimulatedLatency(median_s=2.0, sigma=1.0)
    times = sorted(simulated.longest_s(seed, 1) for seed in range(2_001))
    assert 1.8 < times[1_000] < 2.2
    assert times[-20] > 8.0
    assert simulated.longest_s(7, 4) == simulated.longest_s(7, 4) >= simulated.longest_s(7, 1)


@pytest.fixture(scope="module")
def prompts():
    return [
        Prompt(record=PromptRecord(prompt=str(number), answer="a"), token_ids=[number])
        for number in range(64)
    ]


@pytest.fixture
def client():
    """Client with a partition whose samples are in groups of two."""
    with InMemoryDataPlaneClient({"enabled": True, "impl": "in_memory"}) as client:
        client.register_partition("train", ["prompt"], 100, ["generate"], grpo_group_size=2)
        yield client


def test_pending_prompts_are_put_before_those_of_the_stream(prompts, client):
    stream = PromptStream(prompts, seed=1, shuffle=True, position=40)
    feed = PromptFeed(client, stream, [31, 38], 2)
    feed.put(3)
    assert stream.position == 41
    claim = client.claim_meta("train", "generate", ["prompt"], 6)
    stored = client.get_data(claim)["prompt"].tolist()
    assert claim.sample_ids == [
        f"{position:09d}_g{number}" for position in (31, 38, 40) for number in (0, 1)
    ]
    fresh = PromptStream(prompts, seed=1, shuffle=True)
    order = fresh.take(41)
    assert [each["token_ids"] for each in stored[::2]] == [
        order[position].token_ids for position in (31, 38, 40)
    ]
    client.clear_samples(claim.sample_ids[:2], "train")
    assert feed.untrained() == [38, 40]


class ClearsWhileListing:
    """Client whose inspector clears groups after each page of samples."""

    def __init__(self, client, cleared):
        self._client, self._cleared = client, iter(cleared)

    def __getattr__(self, name):
        return getattr(self._client, name)

    @property
    def inspector(self):
        inspector = self._client.inspector
        inspector.list_samples = self._list_samples
        return inspector

    def _list_samples(self, partition_id, *, start, limit):
        page = self._client.inspector.list_samples(partition_id, start=start, limit=4)
        ids = [
            f"{position:09d}_g{number}" for position in next(self._cleared, ()) for number in (0, 1)
        ]
        self._client.clear_samples(ids, partition_id)
        return page


def test_groups_cleared_in_a_checkpoint_hide_no_prompt(prompts, client):
    stream = PromptStream(prompts, seed=1, shuffle=True)
    clearing = ClearsWhileListing(client, [[0]])
    feed = PromptFeed(clearing, stream, [], 2)
    feed.put(5)
    assert {1, 2, 3, 4} <= {*feed.untrained()} <= {0, 1, 2, 3, 4}
    client.clear_samples(["000000001_g0", "000000001_g1"], "train")
    feed.forget(["000000001_g0", "000000001_g1"])
    assert feed.untrained() == [2, 3, 4]


class Calls:
    """Stand-in for the calls to the actors; ``failing`` maps methods to the errors of one actor."""

    def __init__(self, failing=()):
        self.failing = dict(failing)

    def call(self, name, method, *args, **kwargs):
        if method in self.failing:
            raise self.failing[method]

    def each(self, method, calls, *, errors=None, timeout_s=None):
        error = self.failing.get(method)
        if error is not None and errors is None:
            raise error
        if error is not None:
            errors[next(iter(calls))] = error
        return {}


def fleet_of(configure_async, calls, notices):
    """Return a started fleet of two generators."""
    actors = SimpleNamespace(
        calls=calls, generators=[GeneratorActors(f"rollout {i}", f"worker {i}") for i in range(2)]
    )
    fleet = GeneratorFleet(
        None,
        actors,
        None,
        None,
        configure_async(),
        run_id="run",
        journal=None,
        notice=notices.append,
    )
    fleet.start()
    return fleet


def test_run_survives_generator_lost_after_the_last_step(configure_async):
    notices = []
    lost = WorkerError("rollout 0 died during stop_generating")
    fleet_of(configure_async, Calls({"stop_generating": lost}), notices).stop()
    assert notices == [str(lost)]


@pytest.mark.parametrize("method", ["__init__", "join_refit", "start_generating"])
def test_a_replacement_that_dies_or_fails_to_join_is_removed(configure_async, method):
    notices, removed, calls = [], [], Calls()
    fleet = fleet_of(configure_async, calls, notices)
    actors = fleet._actors
    lost, new = actors.generators.pop(), GeneratorActors("rollout 2", "worker 2")

    def admit(names):
        calls.call(names.worker, "join_refit")
        actors.generators.append(names)

    actors.admit_generator = admit
    actors.remove_generator = lambda names: (actors.generators.remove(names), removed.extend(names))
    actors.start_generator = lambda: new
    calls.remove = removed.append
    calls.is_dead, calls.is_alive = lambda name: False, lambda name: True
    fleet._weight_sync = SimpleNamespace(sync=lambda version: None)
    fleet._client = SimpleNamespace(inspector=SimpleNamespace(list_claims=lambda partition: []))
    fleet.replace_lost(1)
    calls.is_dead = lambda name: method == "__init__" and name == new.worker
    calls.failing[method] = WorkerError(f"{method} failed")
    fleet.replace_lost(2)
    assert lost not in actors.generators
    assert new not in actors.generators
    assert {*removed} == {*new}
    assert len(notices) == 1
    expected = "died while it started" if method == "__init__" else f"{method} failed"
    assert expected in notices[0]


def test_a_step_in_which_no_rollout_ended_has_no_means(configure_async):
    metrics = fleet_of(configure_async, Calls(), []).take_metrics()
    assert metrics["generated"] == 0
    json.dumps(metrics, allow_nan=False)
    assert not {"generated_reward", "tokens_per_s"} & metrics.keys()


def test_a_sample_without_weight_versions_is_named():
    with pytest.raises(WorkerError, match=r"sample 'b': .* reported no weight_versions"):
        required_versions({"weight_versions": [[], None]}, ["a", "b"])
    assert required_versions({"weight_versions": [[]]}, ["a"]) == [[]]
