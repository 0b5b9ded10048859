"""Update one vLLM on this CPU in one of three ways and time it, in vLLM's environment.

    python integration/vllm/compare_backends.py mx --hidden 512 --layers 8

- ``mx``: refit-mx's engine.
- ``reload``: vLLM's own ``reload_weights`` of a safetensors folder.
- ``modelexpress``: vLLM's backend of that name, which needs CUDA. Its CUDA calls are replaced here
  (`modelexpress_seams` of refit-mx's tests, and three more names). So the figures measure its
  planning, NIXL without RDMA and vLLM's processing; they say nothing about a GPU.

Trainer, control plane and vLLM are one process. The program prints one JSON object: milliseconds of
each call by update, the first one cold, and whether the answers equal those of a fresh vLLM.
Imports internals: vLLM loads no plugins here, so the engine is registered.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.update(
    VLLM_TARGET_DEVICE="cpu", VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS="1",
    HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="WARNING", UCX_TLS="tcp,shm,self", UCX_MODULES="^ib",
)  # fmt: skip

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from vllm import LLM, SamplingParams

from refit_mx import EmbeddedControlServer
from refit_mx.engine.registration import register

sys.path.insert(0, str(Path(__file__).parents[2] / "packages/refit-mx/tests"))
import modelexpress_seams as seams

MODEL = "m"
PROMPTS = [[(7 * place + 3) % 250 for place in range(length)] for length in (4, 30, 130)]
SAMPLING = SamplingParams(max_tokens=16, temperature=0, logprobs=0, detokenize=False)
Update = Callable[[str, dict[str, torch.Tensor]], dict[str, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("backend", choices=["mx", "modelexpress", "reload"])
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument("--transport", default="auto", help="transport of mx")
    parser.add_argument("--as-it-is", action="store_true", help="replace no CUDA calls")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        folders = Path(stack.enter_context(TemporaryDirectory()))
        versions = [_save(folders / str(seed), arguments, seed) for seed in range(3)]
        replaced = arguments.backend == "modelexpress" and not arguments.as_it_is
        stack.enter_context(_modelexpress_on_cpu() if replaced else nullcontext())
        if arguments.backend == "mx":
            register()  # vLLM does so only if refit-mx is installed; here it is on the path
        server = stack.enter_context(EmbeddedControlServer())
        os.environ.update(MX_SERVER_ADDRESS=server.address, MX_WORKER_HOST="127.0.0.1")
        transfer = None if arguments.backend == "reload" else {"backend": arguments.backend}
        llm = _start(folders / "0", transfer)
        update = {"mx": _mx, "modelexpress": _modelexpress, "reload": _reload}[arguments.backend](
            llm, server, folders, arguments
        )
        calls = [update(str(1 + n % 2), versions[1 + n % 2]) for n in range(arguments.updates)]
        last = 1 + (arguments.updates - 1) % 2
        equal = _answers(llm) == _answers(_start(folders / str(last), None))
        result = {
            "backend": arguments.backend,
            "parameters": sum(tensor.numel() for tensor in versions[0].values()),
            "equal_to_a_fresh_vllm": equal,
            "ms": {name: [round(1000 * each[name], 1) for each in calls] for name in calls[0]},
        }
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()
        os._exit(0)  # several engines in one process would deadlock at their ends


def _save(folder: Path, arguments: argparse.Namespace, seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=4096, hidden_size=arguments.hidden, intermediate_size=3 * arguments.hidden,
        num_hidden_layers=arguments.layers, num_attention_heads=arguments.hidden // 32,
        num_key_value_heads=arguments.hidden // 64, head_dim=32, tie_word_embeddings=False,
        initializer_range=0.2, max_position_embeddings=512,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def _start(folder: Path, transfer: dict[str, str] | None) -> LLM:
    return LLM(
        str(folder), dtype="bfloat16", enforce_eager=True, skip_tokenizer_init=True,
        enable_prefix_caching=False, kv_cache_memory_bytes=134217728, max_model_len=256,
        weight_transfer_config=transfer,
    )  # fmt: skip


def _answers(llm: LLM) -> list[tuple[list[int], list[float]]]:
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = [each.outputs[0] for each in llm.generate(prompts, SAMPLING, use_tqdm=False)]
    return [
        (list(o.token_ids), [next(iter(step.values())).logprob for step in o.logprobs])
        for o in outputs
    ]


def _timed(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    seconds = {}
    for name, call in calls.items():
        began = time.perf_counter()
        call()
        seconds[name] = time.perf_counter() - began
    return seconds


def _session(llm: LLM, info: dict[str, Any]) -> dict[str, Callable[[], object]]:
    return {
        "start": llm.start_weight_update,
        "update": lambda: llm.update_weights({"update_info": info}),
        "finish": llm.finish_weight_update,
    }


def _mx(llm: LLM, server: Any, folders: Path, arguments: argparse.Namespace) -> Update:
    from refit_mx import ControlClient, MxV2TrainingPublisher

    control = ControlClient(server.address)
    publisher = MxV2TrainingPublisher(MODEL, "fsdp-0", control=control)
    info = {
        "control_address": server.address,
        "model_name": MODEL,
        "transport": arguments.transport,
    }
    llm.init_weight_transfer_engine({"init_info": info})
    count = 0

    def update(name: str, tensors: dict[str, torch.Tensor]) -> dict[str, float]:
        nonlocal count
        count += 1
        version = f"v{count}"

        def publish() -> None:
            control.create_version(MODEL, ["fsdp-0"], idempotency_key=version, version_id=version)
            publisher.publish(version, tensors)

        return _timed({"publish": publish, **_session(llm, {"version_id": version})})

    return update


def _modelexpress(llm: LLM, server: Any, folders: Path, arguments: argparse.Namespace) -> Update:
    from modelexpress_rl import (
        FSDPTrainerContext,
        ModelExpressControlClient,
        ModelExpressTrainerClient,
        ModelExpressTrainerConfig,
        TrainerStagingMode,
        WeightPayloadFormat,
        WeightVersionRef,
    )

    form = WeightPayloadFormat.FULL_TENSOR
    trainer = ModelExpressTrainerClient.initialize(
        ModelExpressTrainerConfig(
            device_id=0, model_name=MODEL, staging_mode=TrainerStagingMode.COPY_TO_DEVICE,
            payload_format=form, worker_id="trainer", server_url=server.address,
            engine_context=FSDPTrainerContext(),
        )
    )  # fmt: skip
    control = ModelExpressControlClient.connect(server_url=server.address)
    llm.init_weight_transfer_engine(
        {"init_info": {"model_name": MODEL, "server_url": server.address}}
    )
    count = 0

    def update(name: str, tensors: dict[str, torch.Tensor]) -> dict[str, float]:
        nonlocal count
        count += 1
        version = control.create_weight_version(
            model_name=MODEL, idempotency_key=f"v{count}", payload_format=form,
            expected_source_slots=[trainer.source_slot_id],
        ).version_id  # fmt: skip

        def publish() -> None:
            trainer.stage_shard(version=WeightVersionRef(version), tensors=tensors).publish()

        seconds = _timed({"publish": publish, **_session(llm, {"version_id": version})})
        # Its single set of buffers holds the version until it is released.
        control.delete_weight_version(version)
        trainer.release_version(version=WeightVersionRef(version))
        return seconds

    return update


def _reload(llm: LLM, server: Any, folders: Path, arguments: argparse.Namespace) -> Update:
    def update(name: str, tensors: dict[str, torch.Tensor]) -> dict[str, float]:
        def reload() -> None:
            llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folders / name)})

        return _timed({"reload": reload})

    return update


def _modelexpress_on_cpu() -> ExitStack:
    """Replace each CUDA call of a full-tensor update."""
    import modelexpress.engines.vllm.adapter as adapter
    import modelexpress_rl.inference.engines.vllm.installer as installer

    stack = ExitStack()
    stack.enter_context(seams.modelexpress_on_cpu())
    installer.torch = seams._TorchOnCpu("torch")
    adapter.accelerator_backend_for = lambda device: seams._CpuBackend()
    adapter._get_vllm_device_id = lambda *device: 0
    return stack


if __name__ == "__main__":
    main()
