"""The refit engine on a GPU: experts, latent attention, fp8 layers and captured graphs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from integration.vllm.in_process import answers, start, status, update
from integration.vllm.published import Trainer, checkpoint
from integration.vllm.tiny_model import VOCABULARY, build_tokenizer, save_random_model
from safetensors.torch import save_file
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from vllm.distributed import cleanup_dist_env_and_memory

from refit_mx import TensorSpec, compile_pass
from refit_mx.compile.base import allocate_outputs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SIZES: dict[str, Any] = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "initializer_range": 0.1,
}
FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"],
}


def dense() -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**SIZES))


def experts() -> PreTrainedModel:
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SIZES, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=128)
    )


def latent() -> PreTrainedModel:
    """Return a model with multi-head latent attention, experts and a shared expert."""
    sizes = {name: size for name, size in SIZES.items() if name != "head_dim"}
    return DeepseekV2ForCausalLM(
        DeepseekV2Config(
            **{**sizes, "num_key_value_heads": 4},
            first_k_dense_replace=1,
            n_group=1,
            topk_group=1,
            kv_lora_rank=512,
            q_lora_rank=None,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            n_routed_experts=8,
            n_shared_experts=1,
            num_experts_per_tok=2,
            moe_intermediate_size=128,
        )
    )


def save(folder: Path, make: Callable[[], PreTrainedModel], seed: int) -> Path:
    """Write a random model in bfloat16."""
    return save_random_model(folder, make, seed, torch.bfloat16)


def quantized(folder: Path, into: Path) -> Path:
    """Write a model's copy with fp8 weights and a scale for each block of 128 x 128."""
    build_tokenizer().save_pretrained(into)
    # The last bit of a scale depends on the device.
    tensors = {name: tensor.cuda() for name, tensor in checkpoint(folder).items()}
    compiler = compile_pass("deep_gemm_fp8")
    specs = [
        TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in tensors.items()
    ]
    outputs = allocate_outputs(compiler, specs, "cuda")
    compiler.run(tensors, outputs)
    kept = {name: tensors[name] for name in compiler.unchanged(specs)}
    save_file({**kept, **outputs}, into / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (into / "config.json").write_text(json.dumps({**config, "quantization_config": FP8}))
    return into


@pytest.fixture(autouse=True)
def new_process_groups():
    """Let vLLM create its process groups again: those of a dense model have none for experts."""
    cleanup_dist_env_and_memory()


def options(*, eager: bool) -> dict[str, Any]:
    """Return vLLM's options, with graphs of a few sizes unless ``eager``."""
    sizes = {"compilation_config": {"cudagraph_capture_sizes": [1, 2, 4]}}
    return {"dtype": "bfloat16", "enforce_eager": eager, **({} if eager else sizes)}


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize("make", [dense, experts, latent])
def test_refitted_model_answers_like_a_fresh_vllm(tmp_path, make, eager):
    folders = [save(tmp_path / str(seed), make, seed) for seed in range(2)]
    expected = answers(start(folders[1], **options(eager=eager)))
    llm = start(folders[0], **options(eager=eager))
    before = answers(llm)
    assert before != expected
    with Trainer("tiny", slots=2) as trainer:
        for transport in ("shm", "tcp", "nixl"):
            llm.init_weight_transfer_engine({"init_info": trainer.init_info(transport=transport)})
            for seed, answered in ((1, expected), (0, before)):
                trainer.publish(f"{transport}-{seed}", checkpoint(folders[seed]))
                update(llm, f"{transport}-{seed}")
                assert answers(llm) == answered
                assert status(llm)["version_id"] == f"{transport}-{seed}"


@pytest.mark.parametrize("transport", ["tcp", "nixl"])
def test_weights_are_served_from_the_trainers_gpu(tmp_path, transport):
    folders = [save(tmp_path / str(seed), dense, seed) for seed in range(2)]
    expected = answers(start(folders[1], **options(eager=True)))
    llm = start(folders[0], **options(eager=True))
    with Trainer("tiny", slots=2, transports=[transport], device="cuda") as trainer:
        llm.init_weight_transfer_engine({"init_info": trainer.init_info(transport=transport)})
        weights = {name: tensor.cuda() for name, tensor in checkpoint(folders[1]).items()}
        trainer.publish("v1", weights)
        update(llm, "v1")
    assert answers(llm) == expected


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize("make", [dense, experts])
def test_bfloat16_weights_are_quantized_for_an_fp8_model(tmp_path, make, eager):
    raw = [save(tmp_path / f"raw-{seed}", make, seed) for seed in range(2)]
    folders = [quantized(raw[seed], tmp_path / str(seed)) for seed in range(2)]
    expected = answers(start(folders[1], **options(eager=eager)))
    llm = start(folders[0], **options(eager=eager))
    assert answers(llm) != expected
    with Trainer("tiny", slots=2) as trainer:
        info = trainer.init_info(compile_target="deep_gemm_fp8")
        llm.init_weight_transfer_engine({"init_info": info})
        trainer.publish("v1", checkpoint(raw[1]))
        update(llm, "v1")
    assert answers(llm) == expected


@pytest.mark.parametrize("make", [dense, experts])
def test_fp8_checkpoint_is_installed_as_published(tmp_path, make):
    raw = [save(tmp_path / f"raw-{seed}", make, seed) for seed in range(2)]
    folders = [quantized(raw[seed], tmp_path / str(seed)) for seed in range(2)]
    expected = answers(start(folders[1], **options(eager=True)))
    llm = start(folders[0], **options(eager=True))
    with Trainer("tiny") as trainer:
        llm.init_weight_transfer_engine({"init_info": trainer.init_info()})
        trainer.publish("v1", checkpoint(folders[1]))
        update(llm, "v1")
    assert answers(llm) == expected
