"""Adapters, with stand-ins for the trainers.

`integration/test_trl.py` trains with TRL, `integration/verl` runs verl's loop, and
`integration/test_skyrl.py` runs SkyRL's loop.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from setup_processes import (
    collector,
    run_script,
    start_script,
    status,
    step_points,
    wait_for_end,
)

from observability import adapters
from observability.receiver import Receiver
from observability.views import Step, steps_of

TRL = """
from types import ModuleType, SimpleNamespace

class ProfilingContext:
    def __init__(self, name):
        self.name = "GRPOTrainer." + name
    def __enter__(self):
        return self
    def __exit__(self, *error):
        return False

original = vars(ProfilingContext).copy()
for name in ("transformers", "trl", "trl.extras", "trl.extras.profiling"):
    sys.modules[name] = ModuleType(name)
sys.modules["transformers"].TrainerCallback = object
sys.modules["trl.extras.profiling"].ProfilingContext = ProfilingContext
from observability.adapters.trl import TraceCallback

def block(name):
    with ProfilingContext(name):
        pass

callback = TraceCallback("r")
def event(name, step=0, is_first=True, **arguments):
    arguments = SimpleNamespace(to_sanitized_dict=lambda: {"beta": 0.1}, **arguments)
    state = SimpleNamespace(global_step=step, is_world_process_zero=is_first)
    getattr(callback, name)(arguments, state, None)
def begin(step, **arguments):
    event("on_step_begin", step, **arguments)
def log(step, **logs):
    state = SimpleNamespace(global_step=step, is_world_process_zero=True)
    sizes = {"train_batch_size": 4, "world_size": 2, "gradient_accumulation_steps": 8}
    callback.on_log(SimpleNamespace(**sizes), state, None, logs=logs)
"""


def run_traced_trl(receiver: Receiver, body: str, exit_code: int = 0) -> list[Step]:
    """Train without TRL; ``body`` calls the callback as its trainer would."""
    program = f"""{TRL}
setup("grpo.driver", run_id="r", endpoint=ENDPOINT)
event("on_train_begin")
{body}
event("on_train_end")
report(restored=all(vars(ProfilingContext)[name] is original[name]
                    for name in ("__enter__", "__exit__")))
"""
    result = wait_for_end(start_script(program, receiver.endpoint))
    assert result.exit_code == exit_code, result.stderr_lines
    assert result.reports == ([] if exit_code else [{"restored": True}])
    return steps_of(receiver.snapshot())


def test_trl_backward_passes_and_the_optimizer_have_spans(receiver: Receiver) -> None:
    [step] = run_traced_trl(
        receiver,
        """
begin(4)
block("compute_loss")
event("on_substep_end")
block("_prepare_inputs")
block("compute_loss")
event("on_pre_optimizer_step")
event("on_optimizer_step")
event("on_step_end")
""",
    )
    assert (step.run_id, step.number, step.incomplete) == ("r", 4, [])
    assert [span.name for span in step.children(step.root.span_id)] == [
        "forward",
        "backward",
        "rollout",
        "forward",
        "backward",
        "optimizer_step",
    ]


@pytest.mark.parametrize(("mode", "bucket"), [("server", "idle"), ("colocate", "productive")])
def test_trl_is_idle_only_while_a_vllm_server_generates(
    receiver: Receiver, mode: str, bucket: str
) -> None:
    [step] = run_traced_trl(
        receiver, f'begin(0, vllm_mode="{mode}"); block("vLLM.generate"); event("on_step_end")'
    )
    [generate] = step.children(step.root.span_id)
    assert (generate.name, generate.attributes["rl.bucket"]) == ("generate", bucket)


def test_trl_blocks_outside_of_a_step_have_no_spans(receiver: Receiver) -> None:
    [step] = run_traced_trl(
        receiver, 'begin(0); event("on_step_end"); block("compute_loss"); block("my_reward")'
    )
    assert [span.name for span in receiver.snapshot().spans] == ["grpo.step"]
    assert step.incomplete == []


@pytest.mark.parametrize(
    ("body", "failed"),
    [
        ('block("compute_loss"); raise ValueError("contains a sample")', {"backward"}),
        (
            'with ProfilingContext("_calculate_rewards"): raise ValueError("contains a sample")',
            {"environment_step"},
        ),
    ],
    ids=["backward", "rewards"],
)
def test_trl_error_ends_the_step_as_failed(receiver: Receiver, body: str, failed: set[str]) -> None:
    [step] = run_traced_trl(receiver, f"begin(0)\n{body}", exit_code=1)
    errors = {s.name for s in step.spans if s.attributes.get("error.type") == "ValueError"}
    assert errors == {"grpo.step", *failed}
    assert [span.name for span in step.tree.roots] == ["grpo.step"]
    assert not any("sample" in reason for reason in step.incomplete)
    started, ended = receiver.snapshot().events
    assert (started.name, ended.name) == ("run_started", "run_failed")
    assert ended.attributes["error.type"] == "ValueError"


def test_trl_step_ends_if_training_stops_within_it(receiver: Receiver) -> None:
    steps = run_traced_trl(receiver, 'begin(0); block("compute_loss"); begin(0); block("x")')
    assert [step.incomplete for step in steps] == [[], []]


def test_trl_run_is_recorded_by_the_first_rank_alone(receiver: Receiver) -> None:
    run_script(
        f"""{TRL}
setup("grpo.driver", instance="1", run_id="r", endpoint=ENDPOINT)
event("on_train_begin", is_first=False)
begin(0)
event("on_step_end")
state = SimpleNamespace(global_step=1, is_world_process_zero=False)
callback.on_log(None, state, None, logs={{"loss": 1.0}})
event("on_train_end")
""",
        receiver.endpoint,
    )
    records = receiver.snapshot()
    assert [span.name for span in records.spans] == ["grpo.step"]
    assert records.events == []


VERL = """
from contextlib import contextmanager
from types import ModuleType

class Tracking:
    def __init__(self, project_name, experiment_name, config=None): ...
    def log(self, data, step): ...
    def finish(self, exit_code=None): ...
    def __del__(self):
        self.finish()

@contextmanager
def marked_timer(name, timing_raw, **options):
    yield

for name in ("verl", "verl.utils", "verl.utils.profiler", "verl.utils.tracking"):
    sys.modules[name] = ModuleType(name)
sys.modules["verl.utils.profiler"].marked_timer = marked_timer
sys.modules["verl.utils.tracking"].Tracking = Tracking
from observability.adapters.verl import install
install()
"""


def test_deleted_tracking_keeps_exit_code_of_another_verl_run() -> None:
    with Receiver() as receiver:
        body = """
import os
os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = ENDPOINT
tracking = Tracking("p", "r")
Tracking("p", "r")
tracking.finish(exit_code=0)
"""
        result = run_script(f"{VERL}\n{body}", receiver.endpoint)
        assert result.exit_code == 0
        assert [event.name for event in receiver.snapshot().events] == [
            "run_started",
            "run_finished",
        ]


@pytest.mark.parametrize(
    ("call", "resumed_from"),
    [
        ("pass", None),
        ("tracking.log({'train/loss': 0.5}, step=1)", None),
        ("tracking.log({'val-aux/a/reward/mean@1': 0.5}, step=4)", 4),
        ("step(5)", 4),
    ],
    ids=["no-step", "new", "validation", "step"],
)
def test_verl_run_in_telemetry_of_its_program_is_resumed_at_its_first_step(
    call: str, resumed_from: int | None
) -> None:
    with Receiver() as receiver:
        body = f"""
def step(number):
    skip_manager = sys.modules["verl.utils.skip.skip_manager"] = ModuleType("skip_manager")
    skip_manager.SkipManager = type("SkipManager", (), {{"step": number}})
    with sys.modules["verl.utils.profiler"].marked_timer("step", {{}}):
        pass
    tracking.log({{"actor/loss": 0.5}}, step=number)

with setup("other", endpoint=ENDPOINT):
    tracking = Tracking("p", "r")
    {call}
    tracking.finish(exit_code=0)
"""
        result = run_script(f"{VERL}\n{body}", receiver.endpoint)
        assert result.exit_code == 0
        events = receiver.snapshot().events
    assert [event.name for event in events] == ["run_started", "run_finished"]
    assert {event.attributes["rl.run_id"] for event in events} == {"r"}
    assert events[0].attributes.get("dataplane.resumed_from") == resumed_from


def test_verl_validation_is_the_mean_of_its_data_sources() -> None:
    with collector(status(200)) as server:
        run_script(
            f"""{VERL}
with setup("other", endpoint=ENDPOINT):
    tracking = Tracking("p", "r")
    tracking.log({{
        "val-core/a/b/acc/mean@4": 0.5, "val-core/a/b/acc/best@4/mean": 0.9,
        "val-aux/a/b/reward/mean@4": 0.25, "val-aux/a/b/reward/mean@2": 0.0,
        "val-core/c/reward/mean@1": 0.75, "val-core/d/acc/mean@1": 1,
        "training/off_policy/trajectory_staleness/max": 2,
    }}, step=3)
""",
            server.endpoint,
        )
        values = {name: (value, facts["rl.step"]) for name, _, value, facts in step_points(server)}
    assert values["rl.validation.reward"] == (0.5, 3)
    assert values["rl.validation.pass_rate"] == (0.75, 3)
    assert values["rl.staleness.max"] == (2, 2)
    assert values["val-core/a/b/acc/best_4/mean"] == (0.9, 3)


@pytest.mark.parametrize(
    ("program", "end"),
    [
        (f"{TRL}\nevent('on_train_begin'); event('on_train_end')", "run_finished"),
        (f"{TRL}\nevent('on_train_begin')", "run_stopped"),
        (f"{TRL}\nevent('on_train_begin'); event('on_train_begin')", "run_stopped"),
    ],
    ids=["complete", "stopped", "again"],
)
def test_trl_start_and_end_of_the_run_are_recorded(program: str, end: str) -> None:
    with Receiver() as receiver:
        result = run_script(f"setup('svc', endpoint=ENDPOINT)\n{program}", receiver.endpoint)
        assert result.exit_code == 0
        started, ended, *others = receiver.snapshot().events
    assert [event.name for event in others] == [started.name, ended.name] * (len(others) // 2)
    assert (started.name, started.attributes["rl.run_id"]) == ("run_started", "r")
    assert (ended.name, ended.attributes["rl.run_id"]) == (end, "r")
    assert started.attributes["dataplane.config"] == {"beta": "0.1"}


def test_trl_metrics_get_the_numbers_of_their_steps() -> None:
    with collector(status(200)) as server:
        run_script(
            f"""{TRL}
with setup("svc", endpoint=ENDPOINT):
    log(1, **{{
        "loss": 0.5, "clip_ratio/region_mean": 0.25, "rewards/accuracy/mean": 0.75,
        "epoch": 0.1, "kl": None, "sample/staleness_mean": 1.5,
    }})
    log(2, eval_reward=0.6)
    log(2, train_loss=0.5, train_runtime=9.0)
""",
            server.endpoint,
        )
        facts = {"rl.step": 0, "rl.run_id": "r"}
        assert sorted(step_points(server), key=lambda point: point[0]) == [
            ("epoch", "1", 0.1, facts),
            ("rl.clip_fraction", "1", 0.25, facts),
            ("rl.loss", "1", 0.5, facts),
            ("rl.reward.component", "1", 0.75, {**facts, "rl.component": "accuracy"}),
            ("rl.samples", "{sample}", 64.0, facts),
            ("rl.staleness.mean", "{version}", 1.5, facts),
            ("rl.validation.reward", "1", 0.6, {**facts, "rl.step": 2}),
        ]


@pytest.mark.parametrize(
    ("module", "use", "missing"),
    [
        ("trl", "TraceCallback('r')", "TRL"),
        ("verl", "install()", "verl"),
        ("skyrl", "trace_steps('r').__enter__()", "SkyRL"),
    ],
    ids=["trl", "verl", "skyrl"],
)
def test_adapter_without_its_trainer_names_what_is_missing(
    module: str, use: str, missing: str
) -> None:
    program = f"""
import sys
sys.modules.update(dict.fromkeys(["transformers", "trl", "verl", "skyrl"]))
try:
    import observability.adapters.{module} as adapter
    adapter.{use}
except ImportError as error:
    print(error)
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert f"needs {missing} (" in result.stdout


def test_every_module_of_the_adapters_is_short() -> None:
    [folder] = adapters.__path__
    lengths = {path.name: path.read_text().count("\n") for path in Path(folder).glob("*.py")}
    assert max(lengths.values()) <= 150, lengths
