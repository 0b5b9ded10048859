"""Steps of environments in this process: their start, their deadline, and checks of their results.

Imports internals: the batch of a rollout does not show when a step is awaited.
"""

import asyncio
import threading
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch
from rollout_doubles import Method, batch_of

from dataplane_core import DeadlineExceededError, InvalidRequestError
from rollout_actor import EnvironmentReturn
from rollout_actor.conversation import start_conversations
from rollout_actor.environment_step import step_environments, step_environments_async


def step_async(rows, task_to_env, *, timeout_s):
    return asyncio.run(step_environments_async(rows, task_to_env, timeout_s=timeout_s))


@pytest.fixture(params=[step_environments, step_async], ids=["sync", "async"])
def step(request):
    def stepped(tasks, envs, *, timeout_s=30.0, first_row=0):
        tasks = ["other"] * first_row + tasks
        rows = start_conversations(batch_of(["1+2="] * len(tasks), tasks=tasks))[first_row:]
        return request.param(rows, envs, timeout_s=timeout_s)

    return stepped


def answer(count, **changes):
    parts = {
        "observations": [{"role": "environment", "content": str(row)} for row in range(count)],
        "metadata": None,
        "next_stop_strings": None,
        "rewards": torch.arange(float(count)),
        "terminateds": torch.ones(count, dtype=torch.bool),
        "answers": None,
    }
    return parts | changes


def environment(result):
    return SimpleNamespace(step=Method(lambda logs, infos: result))


def test_all_steps_are_started_before_any_is_awaited(step):
    both_started = threading.Barrier(2)

    def meet():
        future = Future()

        def work():
            both_started.wait(timeout=30)
            future.set_result(answer(1))

        threading.Thread(target=work, daemon=True).start()
        return future

    envs = {name: SimpleNamespace(step=Method(lambda *_: meet())) for name in ("a", "b")}
    assert len(step(["a", "b"], envs)) == 2


def test_outcomes_are_in_the_order_of_the_rows(step):
    envs = {"a": environment(answer(2)), "b": environment(answer(1, rewards=torch.tensor([9.0])))}
    outcomes = step(["a", "b", "a"], envs)
    assert [outcome.reward for outcome in outcomes] == [0.0, 9.0, 1.0]
    assert [outcome.observation["content"] for outcome in outcomes] == ["0", "0", "1"]


def test_a_late_environment_is_named_with_its_deadline(step):
    envs = {"quick": environment(answer(1)), "stuck": environment(Future())}
    with pytest.raises(DeadlineExceededError, match=r"task 'stuck'.*1 rows.*after 0\.05 s"):
        step(["quick", "stuck"], envs, timeout_s=0.05)


def test_a_failure_is_raised_without_waiting_for_the_others(step):
    failed = Future()
    failed.set_exception(KeyError("lost"))
    envs = {"stuck": environment(Future()), "broken": environment(failed)}
    with pytest.raises(KeyError, match="lost") as caught:
        step(["stuck", "broken"], envs, timeout_s=600.0)
    assert caught.value.__notes__ == ["raised by the environment of task 'broken'"]


def test_timeout_raised_by_environment_keeps_its_type(step):
    failed = Future()
    failed.set_exception(TimeoutError("its sandbox"))
    with pytest.raises(TimeoutError, match="its sandbox") as caught:
        step(["a"], {"a": environment(failed)})
    assert not isinstance(caught.value, DeadlineExceededError)


@pytest.mark.parametrize(
    "form",
    [
        lambda parts: EnvironmentReturn(**parts),
        lambda parts: SimpleNamespace(**parts),
        lambda parts: tuple(parts.values()),
        lambda parts: list(parts.values()),
        lambda parts: tuple(parts.values())[:5],
        lambda parts: parts,
    ],
    ids=["named tuple", "object", "tuple", "list", "tuple without answers", "mapping"],
)
def test_every_form_of_a_return_is_read(step, form):
    outcomes = step(["a", "a"], {"a": environment(form(answer(2)))})
    assert [(outcome.reward, outcome.terminated) for outcome in outcomes] == [
        (0.0, True),
        (1.0, True),
    ]


def test_lists_serve_where_tensors_do(step):
    parts = answer(2, rewards=[1, 0.5], terminateds=[False, True])
    outcomes = step(["a", "a"], {"a": environment(parts)})
    assert [(outcome.reward, outcome.terminated) for outcome in outcomes] == [
        (1.0, False),
        (0.5, True),
    ]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "a NoneType without 'observations', 'metadata'"),
        ((1, 2), "a tuple of 2 without 'next_stop_strings', 'rewards', 'terminateds'"),
        (answer(2, rewards=torch.zeros(1)), r"reward 'rewards' of shape \(1,\)"),
        (answer(2, rewards=torch.zeros(2, 1)), r"reward 'rewards' of shape \(2, 1\)"),
        (answer(2, rewards={"x": torch.zeros(3)}), r"reward 'x' of shape \(3,\)"),
        (answer(2, observations=[]), "observations is a list of 0"),
        (answer(2, observations=None), "observations is a NoneType"),
        (answer(2, metadata="ab"), "metadata is a str of 2; expected one value for each"),
        (answer(2, metadata={"x": 1, "y": 2}), "metadata is a dict of 2"),
        (answer(2, metadata=torch.tensor(2)), "metadata is a Tensor; expected one value"),
        (
            answer(2, observations=[{"role": "user", "content": "\ud800"}] * 2),
            "observation of row 5 has a lone surrogate in its content",
        ),
        (answer(2, observations=["a", "b"]), "observation of row 5 is a str of 1"),
        (answer(2, observations=[{"content": ""}] * 2), "observation of row 5 is a dict of 1"),
        (
            answer(2, observations=[{"role": "user", "content": None}] * 2),
            "observation of row 5 has a NoneType as content; expected a str",
        ),
        (answer(2, metadata=[None]), "metadata is a list of 1"),
        (answer(2, next_stop_strings=[None] * 3), "next_stop_strings is a list of 3"),
        (answer(2, answers=["a"]), "answers is a list of 1"),
        (answer(2, terminateds=torch.ones(1) > 0), r"terminateds of shape \(1,\)"),
        (answer(2, terminateds=torch.ones(2, 1) > 0), r"terminateds of shape \(2, 1\)"),
        (answer(2, terminateds=torch.tensor(True)), r"terminateds of shape \(\)"),
        (answer(2, terminateds=torch.ones(2)), "torch.float32.*expected booleans of shape"),
        (answer(2, terminateds=[0, 1]), r"torch.int64.*expected booleans of shape \(2,\)"),
        (answer(2, terminateds=[None, True]), "terminateds is a list of 2, not a tensor"),
        (answer(2, rewards=[None, 1.0]), "reward 'rewards' is a list of 2, not a tensor"),
        (answer(2, rewards=[1j, 1.0]), "torch.complex64.*expected numbers of shape"),
        (answer(2, rewards={}), "rewards is an empty mapping; expected a component"),
        (answer(2, rewards={3: [1.0, 1.0]}), "reward component 3 is a int; expected a str"),
        (answer(2, rewards=torch.tensor([0.0, torch.nan])), "reward 'rewards' of row 6 is nan"),
        (answer(2, rewards={"x": [torch.inf, 1.0]}), "reward 'x' of row 5 is inf"),
        (answer(2, rewards=[0.0, -torch.inf]), "reward 'rewards' of row 6 is -inf"),
        (
            answer(2, rewards=torch.tensor([0.0, 1e300], dtype=torch.float64)),
            "reward 'rewards' of row 6 is inf",
        ),
        (
            answer(2, next_stop_strings=[["END"], "END"]),
            "next_stop_strings of row 6 are 'END'; expected a list of strings",
        ),
        (answer(2, next_stop_strings=[None, [7]]), r"next_stop_strings of row 6 are \[7\]"),
        (answer(2, next_stop_strings=[None, [""]]), r"row 6 are \[''\]; .*none of them empty"),
    ],
)
def test_invalid_environment_return_names_task_and_part(step, result, message):
    with pytest.raises(InvalidRequestError, match=f"task 'maths'.*{message}"):
        step(["maths", "maths"], {"maths": environment(result)}, first_row=5)
