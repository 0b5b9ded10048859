"""Adapter for SkyRL, with a stand-in; `integration/test_skyrl.py` runs SkyRL's loop."""

import pytest
from setup_processes import collector, run_script, status, step_points

from observability.receiver import Receiver
from observability.views import Step, steps_of

SKYRL = """
from types import ModuleType, SimpleNamespace

class Timer:
    def __init__(self, message, update_dict=None):
        self.message, self.update_dict = message, update_dict
    def __enter__(self):
        return self
    def __exit__(self, *error):
        if self.update_dict is not None:
            self.update_dict[self.message] = 1.0

class RayPPOTrainer:
    def __init__(self, completed):
        self.global_step, self.dynamic_sampling_state = completed + 1, None
    def step(self, rounds=1):
        for number in range(rounds):
            with Timer("step"):
                with Timer("generate"):
                    pass
                self.dynamic_sampling_state = {} if number + 1 < rounds else None
                if self.dynamic_sampling_state is not None:
                    continue
                with Timer("train_critic_and_policy"), Timer("policy_train"):
                    pass
        with Timer("eval"):
            pass
        self.global_step += 1

class Tracking:
    def log(self, data, step, commit=False):
        print(json.dumps(data))

originals = Timer.__enter__, Timer.__exit__, RayPPOTrainer.__init__, Tracking.log
modules = "", ".train", ".train.trainer", ".train.utils", ".train.utils.tracking"
for name in (*modules, ".train.entrypoints"):
    sys.modules["skyrl" + name] = ModuleType("skyrl" + name)
sys.modules["skyrl.train.utils.tracking"].Tracking = Tracking
sys.modules["skyrl.train.trainer"].RayPPOTrainer = RayPPOTrainer
sys.modules["skyrl.train.utils"].Timer = Timer
from observability.adapters import skyrl
"""


def run_traced_skyrl(receiver: Receiver, body: str, **variables: str) -> list[Step]:
    """Run a program with stand-ins for the parts of skyrl 0.4.0 that the adapter uses."""
    methods = "Timer.__enter__, Timer.__exit__, RayPPOTrainer.__init__, Tracking.log"
    program = f"{SKYRL}{body}\nreport(restored=originals == ({methods}))"
    result = run_script(program, OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint, **variables)
    assert (result.exit_code, result.reports[-1:]) == (0, [{"restored": True}])
    return steps_of(receiver.snapshot())


def test_skyrl_stages_are_spans_of_a_step(receiver: Receiver) -> None:
    steps = run_traced_skyrl(
        receiver,
        """
with setup("grpo.driver", run_id="r"), skyrl.trace_steps("r"):
    with Timer("step"):  # before a trainer exists
        pass
    trainer = RayPPOTrainer(completed=3)
    trainer.step()
    trainer.step()
""",
    )
    assert [(step.run_id, step.number, step.incomplete) for step in steps] == [
        ("r", 3, []),
        ("r", 4, []),
    ]
    for step in steps:
        rollout, train = step.children(step.root.span_id)
        assert (rollout.name, rollout.attributes["rl.bucket"]) == ("rollout", "idle")
        assert (train.name, train.attributes["rl.bucket"]) == ("train", "idle")
        assert [span.name for span in step.children(train.span_id)] == ["policy_train"]
    assert len(receiver.snapshot().spans) == 8  # evaluations have no spans
    started, _ = receiver.snapshot().events
    assert started.attributes["dataplane.resumed_from"] == 3


def test_skyrl_dynamic_sampling_continues_its_step(receiver: Receiver) -> None:
    first, second = run_traced_skyrl(
        receiver,
        """
with setup("grpo.driver", run_id="r"), skyrl.trace_steps("r"):
    trainer = RayPPOTrainer(completed=0)
    trainer.step(rounds=3)
    trainer.step()
""",
    )
    names = [span.name for span in first.children(first.root.span_id)]
    assert names == ["rollout", "rollout", "rollout", "train"]
    assert (first.incomplete, second.number, second.incomplete) == ([], 1, [])


def test_skyrl_error_ends_the_step_as_failed(receiver: Receiver) -> None:
    [step] = run_traced_skyrl(
        receiver,
        """
try:
    with setup("grpo.driver", run_id="r"), skyrl.trace_steps("r"):
        trainer = RayPPOTrainer(completed=0)
        with Timer("step"), Timer("generate"):
            raise ValueError("contains a sample")
except ValueError:
    pass
""",
    )
    errors = {span.name: span.attributes.get("error.type") for span in step.spans}
    assert errors == {"grpo.step": "ValueError", "rollout": "ValueError"}
    assert not any("sample" in reason for reason in step.incomplete)


@pytest.mark.parametrize("run_id", ["", "chosen"])
def test_skyrl_entry_point_runs_with_traced_steps(receiver: Receiver, run_id: str) -> None:
    [step] = run_traced_skyrl(
        receiver,
        """
class BasePPOExp:
    def __init__(self, config):
        self.config = config
    def run(self):
        RayPPOTrainer(completed=0).step()

def main():
    assert sys.argv[1:] == [ENDPOINT, "trainer.epochs=1"], sys.argv
    config = SimpleNamespace(trainer=SimpleNamespace(run_name="named"))
    ray.get(main_base.skyrl_entrypoint.remote(config))

main_base = sys.modules["skyrl.train.entrypoints.main_base"] = ModuleType("main_base")
sys.modules["skyrl.train.entrypoints"].main_base = main_base
main_base.BasePPOExp, main_base.main = BasePPOExp, main
ray = sys.modules["ray"] = ModuleType("ray")
ray.get = lambda result: result
ray.remote = lambda num_cpus: lambda function: SimpleNamespace(remote=function)
sys.argv += ["trainer.override_entrypoint=observability.adapters.skyrl", "trainer.epochs=1"]
skyrl.main()
""",
        RUN_ID=run_id,
    )
    assert (step.run_id, step.incomplete) == (run_id or "named", [])


def test_skyrl_metrics_get_the_numbers_of_their_steps() -> None:
    with collector(status(200)) as server:
        run_script(
            f"""{SKYRL}
with setup("grpo.driver", endpoint=ENDPOINT), skyrl.trace_steps("r"):
    Tracking().log({{"eval/all/avg_score": 0.1}}, step=0, commit=True)
    Tracking().log({{
        "reward/avg_raw_reward": 0.5, "eval/all/pass_at_8": 0.25, "timing/step": 2.0,
        "async/staleness_max": 3, "policy/minibatch_rollout_logprobs_abs_diff_mean": 0.1,
    }}, step=1, commit=True)
""",
            server.endpoint,
        )
        facts = {"rl.step": 0, "rl.run_id": "r"}
        assert sorted(step_points(server)) == [
            ("policy/minibatch_rollout_logprobs_abs_diff_mean", "1", 0.1, facts),
            ("rl.logprob_gap.mean", "{nat}", 0.1, facts),
            ("rl.reward.mean", "1", 0.5, facts),
            ("rl.staleness.max", "{version}", 3, facts),
            ("rl.validation.pass_rate", "1", 0.25, {"rl.step": 1, "rl.run_id": "r"}),
            ("rl.validation.reward", "1", 0.1, facts),
            ("timing/step", "1", 2.0, facts),
        ]


def test_skyrl_failure_ends_the_run_as_failed(receiver: Receiver) -> None:
    body = """
from contextlib import suppress
with setup("svc"), suppress(OSError), skyrl.trace_steps("r"):
    raise OSError
"""
    assert run_traced_skyrl(receiver, body) == []
    started, ended = receiver.snapshot().events
    assert (started.name, started.attributes["rl.run_id"]) == ("run_started", "r")
    assert (ended.name, ended.attributes["rl.run_id"]) == ("run_failed", "r")
    assert "dataplane.config" not in started.attributes
