"""Real Ray: environments that are actors, and `SyncRolloutActor` as one."""

import logging
import os
import threading

import pytest
import torch
from rollout_doubles import (
    DP_CFG,
    Arithmetic,
    AsyncAdder,
    CharTokenizer,
    HostingActor,
    batch_of,
    config,
)

from dataplane_core import DeadlineExceededError, UnavailableError
from rollout_actor import SyncRolloutActor

pytestmark = pytest.mark.usefixtures("ray_session")


class Troubled(Arithmetic):
    """Environment that fails in the way that the row's info names."""

    def step(self, message_logs, extra_env_info):
        trouble = extra_env_info[0].get("trouble")
        if trouble == "dies":
            os._exit(1)
        if trouble == "hangs":
            threading.Event().wait()
        if trouble == "raises":
            raise ValueError("a question without an answer")
        return super().step(message_logs, extra_env_info)


@pytest.fixture(scope="module")
def environment(ray_session):
    """Start an environment actor, which keeps serving while some of its steps hang."""
    return ray_session.remote(Troubled).options(num_cpus=0.1, max_concurrency=8).remote()


@pytest.fixture
def mortal_environment(ray_session):
    return ray_session.remote(Troubled).options(num_cpus=0.1).remote()


@pytest.fixture(scope="module", params=["remote", "options"])
def actor(request, ray_session, environment):
    """Start the actor form in each of its two ways; the second with an asynchronous engine."""
    is_async = request.param == "options"
    master = config(
        policy={"generation": {"backend": "x", "async_engine": is_async}},
        env={"step_timeout_s": 20},
    )
    form = HostingActor.options(num_cpus=0.1, name="rollout") if is_async else HostingActor
    started = form.remote(AsyncAdder(), CharTokenizer(), {"sum": environment}, master, DP_CFG)
    yield started
    ray_session.get(started.shutdown.remote(), timeout=60)
    ray_session.kill(started)


def troubled(trouble):
    batch = batch_of(["1+2="])
    batch["extra_env_info"][0]["trouble"] = trouble
    return batch


def test_a_hanging_actor_is_an_error_naming_the_task(rollout, environment):
    with pytest.raises(DeadlineExceededError, match="task 'sum'"):
        rollout(troubled("hangs"), environment, step_timeout_s=0.2)


def test_environment_error_keeps_its_type_and_names_the_task(rollout, environment):
    with pytest.raises(ValueError, match="without an answer") as caught:
        rollout(troubled("raises"), environment)
    assert "raised by the environment of task 'sum'" in caught.value.__notes__


def test_a_dead_actor_is_an_error_naming_the_task(rollout, mortal_environment):
    with pytest.raises(UnavailableError, match="task 'sum': its actor is dead"):
        rollout(troubled("dies"), mortal_environment)


def test_the_actor_form_runs_a_step_and_puts_it(ray_session, actor):
    meta, carry, metrics, generation_metrics = ray_session.get(
        actor.rollout_to_tq.remote(
            batch_of(["1+2=", "1+2=", "3+4=", "3+4="], more=["5+5="]),
            partition_id="train",
            group_size=2,
        ),
        timeout=60,
    )
    assert carry["total_reward"].tolist() == [2.0] * 4
    assert meta.extra_info["rollout_metrics"] == metrics
    assert generation_metrics["calls"] > 0
    columns = ray_session.get(actor.read.remote(meta, ["input_ids", "token_mask"]), timeout=60)
    assert columns["input_ids"].shape == columns["token_mask"].shape
    assert torch.equal(columns["input_ids"][0], columns["input_ids"][1])


def test_errors_of_the_actor_form_keep_their_types(ray_session, actor):
    with pytest.raises(KeyError, match="'nonsense' do not exist"):
        ray_session.get(
            actor.rollout_to_tq.remote(
                batch_of(["1+2="]), partition_id="train", carry_keys=["nonsense"]
            ),
            timeout=60,
        )
    with pytest.raises(ValueError, match="without an answer"):
        ray_session.get(
            actor.rollout_to_tq.remote(troubled("raises"), partition_id="train"), timeout=60
        )


def test_ray_form_changes_no_class_and_logs_nothing(ray_session, caplog):
    logger = logging.getLogger("ray")  # its records do not reach the root, where caplog listens
    logger.addHandler(caplog.handler)
    assert hasattr(SyncRolloutActor.options(num_cpus=0.1), "remote")
    logger.removeHandler(caplog.handler)
    assert caplog.records == []
    assert "remote" not in vars(SyncRolloutActor)
