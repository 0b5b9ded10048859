"""The command of docs/recipes/verl.md with stand-ins for what needs GPUs, and the admin service."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray
import verl
from hydra import compose, initialize_config_module
from integration.admin_service import Admin, serving
from integration.lean_ray import lean_ray
from integration.ports import hold_port
from integration.recipes import RECIPES, blocks
from integration.verl.stand_in import OVERRIDES, Runner, settings
from integration.waiting import wait_until
from verl.trainer.main_ppo import run_ppo

__all__ = ["lean_ray"]

PAGE = blocks("verl", "bash")
UNIT_BYTES = 64 << 20
STAGES = ["rollout", "reward", "logprobs", "reference", "advantages", "train"]


@pytest.fixture(scope="module")
def admin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Admin]:
    """Start the service as the page does, before Ray."""
    holder = hold_port()
    port = holder.getsockname()[1]
    [options] = re.findall(r"^dataplane-admin serve (.*)$", PAGE, re.MULTILINE)
    options = options.replace("auto", f"127.0.0.1:{port}")  # other tests may run a cluster, too
    folder = tmp_path_factory.mktemp("admin")
    with pytest.MonkeyPatch.context() as patch, serving(folder, *options.split()) as admin:
        patch.setenv("RAY_GCS_SERVER_PORT", str(port))
        patch.setattr("ray._private.ray_constants.ENABLE_RAY_CLUSTER", False)  # keep the loopback
        patch.delenv("RUN_ID", raising=False)
        try:
            yield admin
        finally:
            ray.shutdown()
            holder.close()


def train(admin: Admin, run: str, *overrides: str) -> None:
    """Run verl with the overrides of the page and further ones. The first call starts Ray."""
    page = re.findall(r"^  (\S+=\S+?)(?: \\)?$", PAGE, re.MULTILINE)
    assert len(page) == 5
    page = [each.replace("http://127.0.0.1:8080", admin.url) for each in page]
    page = [re.sub("(?<=global_segment_size=).*", str(UNIT_BYTES), each) for each in page]
    machine = [
        "ray_kwargs.ray_init.num_cpus=8",
        "+ray_kwargs.ray_init._node_ip_address=127.0.0.1",
        "+ray_kwargs.ray_init.include_dashboard=False",
        "+ray_kwargs.ray_init.runtime_env.env_vars.HF_TOKEN=secret",
    ]
    name = f"trainer.experiment_name={run}"
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", [*page, *machine, *OVERRIDES, name, *overrides])
    run_ppo(config, Runner)


@pytest.fixture(scope="module")
def watched(admin: Admin, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run two steps of the synchronous trainer; return what the service showed meanwhile."""
    seen = tmp_path_factory.mktemp("run") / "seen"

    def partitions() -> Any:
        """Return the answer once it has the four responses of the last step, without prompts."""
        if not any(each["has_root"] for each in admin.ask("traces", run="my-run")["traces"]):
            return None  # the first step has not ended
        answer = admin.ask("partitions")
        for each in answer["partitions"]:
            written = {field["name"]: field["written"] for field in each["fields"]}
            if each["present"] == written.get("responses") == 4:
                return answer
        return None

    def watch() -> dict[str, Any]:
        try:
            return {
                **wait_until(partitions, 200),  # Ray starts, and a worker imports verl
                "runs": admin.until(lambda: admin.ask("runs")["runs"]),
                "samples": admin.ask("partition/samples", id="train")["samples"],
            }
        finally:
            seen.touch()

    with ThreadPoolExecutor() as pool:
        shown = pool.submit(watch)
        train(admin, "my-run", *settings(wait_for=seen))
        return shown.result()


def ended(admin: Admin, run: str, *, steps: int = 2) -> tuple[Any, list[Any]]:
    """Wait for the end of a run, and return it and the traces of its steps in order."""

    def answers() -> tuple[Any, list[Any]] | None:
        listed = [each for each in admin.ask("traces", run=run)["traces"] if each["has_root"]]
        if len(listed) < steps or (answer := admin.ask("run", run=run))["state"] == "running":
            return None
        return answer, sorted(listed, key=lambda each: each["step"])

    answer, listed = admin.until(answers)
    assert [each["name"] for each in listed] == ["grpo.step"] * steps
    return answer, [admin.ask("trace", id=each["trace_id"]) for each in listed]


def stages(trace: Any) -> list[str]:
    return [row["name"] for row in trace["rows"] if row["depth"] == 1]


def test_live_page_shows_the_packed_queue(watched: dict[str, Any]) -> None:
    [partition] = watched["partitions"]
    assert partition["id"] == "train"
    written = {field["name"]: field["written"] for field in partition["fields"]}
    assert written["responses"] == 4
    assert [unit["capacity"] for unit in watched["storage"]] == [UNIT_BYTES]
    assert sum(unit["used"] for unit in watched["storage"]) > 0
    assert {each["tags"]["status"] for each in watched["samples"]} == {"success"}
    [run] = watched["runs"]
    assert (run["run_id"], run["state"]) == ("my-run", "running")


def test_steps_have_waterfalls_and_critical_paths(admin: Admin, watched: dict[str, Any]) -> None:
    run, (first, last) = ended(admin, "my-run")
    assert (run["state"], run["steps"]) == ("finished", 2)
    assert run["config"]["trainer.experiment_name"] == "my-run"
    assert "secret" not in run["config"].values()
    responses = ("rl.reward.mean", "rl.response.length", "rl.response.truncated")
    staleness = ("rl.staleness.mean", "rl.staleness.max")
    admin.until_curves("my-run", (*responses, *staleness), min_points=2)
    assert (first["step"], last["step"]) == (0, 1)  # verl counts steps from 1
    assert stages(first) == [*STAGES, "refit"]
    assert stages(last) == [*STAGES, "save_checkpoint", "refit"]
    for trace in (first, last):
        assert trace["incomplete"] == []
        path = trace["critical_path"]
        assert set(STAGES) <= {segment["name"] for segment in path}
        assert sum(each["seconds"] for each in path) == pytest.approx(trace["seconds"])


def test_resumed_run_of_colocated_trainer(admin: Admin, watched: dict[str, Any]) -> None:
    mode = "trainer.v1.trainer_mode=colocate_async"
    train(admin, "resumed", mode, *settings(done=5, total=7))
    run, steps = ended(admin, "resumed")
    assert run["state"] == "finished"
    assert [trace["step"] for trace in steps] == [5, 6]
    assert [trace["incomplete"] for trace in steps] == [[], []]
    assert stages(steps[0]) == [*STAGES, "refit"]


def test_failed_run_of_separate_trainer(admin: Admin, watched: dict[str, Any]) -> None:
    mode = "trainer.v1.trainer_mode=separate_async"
    with pytest.raises(RuntimeError, match="out of memory"):
        train(admin, "failed", mode, *settings(failing=2))
    run, (first, last) = ended(admin, "failed")
    assert run["state"] == "failed"
    assert "out of memory" in run["error"]
    assert first["incomplete"] == []
    assert stages(first) == [
        *("switch_wait", "switch_to_trainer", *STAGES, *STAGES),
        *("switch_to_rollout", "refit", "switch_to_rollout"),
    ]
    assert last["rows"][0]["outcome"] == "error"
    assert all("failed: RuntimeError" in reason for reason in last["incomplete"])
    assert last["incomplete"]


def test_hook_of_ray_workers_imports_neither_verl_nor_torch() -> None:
    program = """
import sys
from observability.adapters.verl import install
install()
sys.exit(sorted({"torch", "verl"} & sys.modules.keys()) or 0)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def timers_of_verl() -> set[str]:
    """Return the names of the timers in verl's source."""
    names = set()
    for path in Path(verl.__file__).parent.rglob("*.py"):
        if "marked_timer(" in (source := path.read_text()):
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "marked_timer":
                    name = ast.unparse(node.args[0])
                    names.add("ref" if name == "str(Role.RefPolicy)" else ast.literal_eval(name))
    return names


@ray.remote
def time_step(names: list[str]) -> None:
    """Run verl's timers within a step, and log a validation."""
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer
    from verl.utils.profiler import marked_timer
    from verl.utils.tracking import Tracking

    tracking = Tracking("my-project", "timers", "console", config={})
    with marked_timer("step", {}):
        for name in names:
            with marked_timer(name, {}):
                pass
    rewards = {"reward": [1.0, 0.0], "acc": [1.0, 0.0]}
    sources, samples = ["openai/gsm8k", "math"], ["a", "b"]
    tracking.log(PPOTrainer._val_metrics_update(None, sources, samples, rewards, []), step=1)
    tracking.finish(exit_code=0)


def test_every_timer_of_verl_has_the_span_of_the_page(
    admin: Admin, watched: dict[str, Any]
) -> None:
    text = (RECIPES / "trace-verl.md").read_text()
    expected = {"step": ("grpo.step", None)}
    outside = set()
    for spans, timers, bucket in re.findall(r"^\| (.*`|none) \| (.*) \| (.*) \|$", text, re.M):
        names = re.findall("`(.*?)`", spans if timers == "the same" else timers)
        if spans == "none":
            outside.update(names)
            continue
        shown = re.findall("`(.*?)`", spans)
        for place, name in enumerate(names):
            expected[name] = (shown[min(place, len(shown) - 1)], bucket.strip("`"))
    assert timers_of_verl() == {*expected, *outside}
    ray.get(time_step.remote([name for name in expected if name != "step"]), timeout=120)
    _, [trace] = ended(admin, "timers", steps=1)
    validation = ("rl.validation.reward", "rl.validation.pass_rate")
    admin.until_curves("timers", validation, min_points=1)
    recorded = [(row["name"], row["bucket"]) for row in trace["rows"]]
    assert sorted(recorded[1:]) == sorted(span for name, span in expected.items() if name != "step")
