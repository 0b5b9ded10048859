"""Adapters of other trainers, with stand-ins for the trainers.

`integration/test_recipes.py` trains with TRL, `integration/verl` runs verl's loop.
"""

import subprocess
import sys

import pytest
from setup_processes import run

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
from observability.adapters.trl import trace_steps

def block(name):
    with ProfilingContext(name):
        pass

callbacks = []
trainer = SimpleNamespace(add_callback=callbacks.append, remove_callback=callbacks.remove)
def begin(step, **arguments):
    state = SimpleNamespace(global_step=step)
    callbacks[0].on_step_begin(SimpleNamespace(**arguments), state, None)
def event(name):
    getattr(callbacks[0], name)(None, None, None)
"""


def traced(receiver: Receiver, body: str) -> list[Step]:
    indented = "\n".join(f"    {line}" for line in body.strip().splitlines())
    blocks = 'setup("grpo.driver", run_id="r", endpoint=ENDPOINT), trace_steps(trainer, "r")'
    ran = run(
        f"{TRL}\ntry:\n  with {blocks}:\n{indented}\nexcept ValueError: pass\n{AFTER}",
        receiver.endpoint,
    )
    assert ran.code == 0
    assert ran.report == [{"restored": True, "callbacks": 0}]
    return steps_of(receiver.snapshot())


AFTER = """
restored = all(vars(ProfilingContext)[name] is value for name, value in original.items()
               if name in ("__enter__", "__exit__"))
report(restored=restored, callbacks=len(callbacks))
"""


def test_trl_backward_passes_and_the_optimizer_have_spans(receiver: Receiver) -> None:
    [step] = traced(
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
def test_trl_is_idle_while_a_vllm_server_generates(
    receiver: Receiver, mode: str, bucket: str
) -> None:
    [step] = traced(
        receiver, f'begin(0, vllm_mode="{mode}"); block("vLLM.generate"); event("on_step_end")'
    )
    [generate] = step.children(step.root.span_id)
    assert (generate.name, generate.attributes["rl.bucket"]) == ("generate", bucket)


def test_trl_blocks_outside_of_a_step_have_no_spans(receiver: Receiver) -> None:
    [step] = traced(
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
    [step] = traced(receiver, f"begin(0)\n{body}")
    errors = {s.name for s in step.spans if s.attributes.get("error.type") == "ValueError"}
    assert errors == {"grpo.step", *failed}
    assert [span.name for span in step.tree.roots] == ["grpo.step"]
    assert not any("sample" in reason for reason in step.incomplete)


def test_trl_step_that_training_stopped_in_ends(receiver: Receiver) -> None:
    steps = traced(
        receiver, 'begin(0); block("compute_loss"); begin(0); block("x"); event("on_train_end")'
    )
    assert [step.incomplete for step in steps] == [[], []]


@pytest.mark.parametrize(("module", "missing"), [("trl", "TRL"), ("verl", "verl")])
def test_adapter_without_its_trainer_names_what_is_missing(module: str, missing: str) -> None:
    program = f"""
import sys
sys.modules.update(dict.fromkeys(["transformers", "trl", "verl"]))
try:
    import observability.adapters.{module} as adapter
    adapter.install()
except ImportError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert f"needs {missing} (" in done.stdout
