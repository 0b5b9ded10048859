"""Models that the refit engine installs into, and one that it refuses by name before any change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from integration.vllm.in_process import answers, start, status, update
from integration.vllm.published import Trainer, checkpoint
from integration.vllm.tiny_model import VOCABULARY, save_random_model
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from vllm import LLM
from vllm.distributed import cleanup_dist_env_and_memory

from refit_mx import LayoutError

SIZES: dict[str, Any] = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
}


def qwen2() -> PreTrainedModel:
    """Return a model whose query, key and value have biases."""
    model = Qwen2ForCausalLM(
        Qwen2Config(**{**SIZES, "num_attention_heads": 2}, tie_word_embeddings=True)
    )
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return model


def deepseek() -> PreTrainedModel:
    """Return a dense model with multi-head latent attention."""
    return DeepseekV2ForCausalLM(
        DeepseekV2Config(
            **{**SIZES, "num_key_value_heads": 4},
            first_k_dense_replace=2,
            kv_lora_rank=512,
            q_lora_rank=None,
            qk_nope_head_dim=64,
            qk_rope_head_dim=64,
            v_head_dim=64,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
        )
    )


def mixture() -> PreTrainedModel:
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **SIZES, head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
        )
    )


@pytest.mark.parametrize(
    ("make", "dtype"),
    [(qwen2, torch.float32), (qwen2, torch.bfloat16), (deepseek, torch.bfloat16)],
)
def test_refitted_model_answers_like_a_fresh_vllm(tmp_path, make, dtype):
    folders = [save_random_model(tmp_path / str(seed), make, seed, dtype) for seed in range(2)]
    name = str(dtype).removeprefix("torch.")
    expected = answers(start(folders[1], dtype=name))
    llm = start(folders[0], dtype=name)
    at_launch = answers(llm)
    assert at_launch != expected
    with Trainer("tiny", slots=2) as trainer:
        llm.init_weight_transfer_engine({"init_info": trainer.init_info()})
        trainer.publish("v1", checkpoint(folders[1]))
        update(llm, "v1")
        assert answers(llm) == expected
        for version_id in ("v2", "v3"):  # fetched into the memory that v1 was fetched into
            trainer.publish(version_id, checkpoint(folders[0]))
            llm.start_weight_update()
            llm.update_weights({"update_info": {"version_id": version_id}})
            assert answers(llm) == expected
            llm.update_weights({"update_info": {"abort": True}})
            llm.finish_weight_update()
        trainer.publish("v4", checkpoint(folders[0]))
        update(llm, "v4")
        assert answers(llm) == at_launch


def test_experts_on_a_cpu_are_refused_by_name(tmp_path):
    folder = save_random_model(tmp_path, mixture, 0, torch.float32)
    cleanup_dist_env_and_memory()  # process groups of a dense model have none for experts
    llm: LLM = start(folder)
    before = answers(llm)
    with Trainer("tiny") as trainer:
        llm.init_weight_transfer_engine({"init_info": trainer.init_info()})
        trainer.publish("v1", checkpoint(folder))
        llm.start_weight_update()
        with pytest.raises(LayoutError, match=r"experts.*FusedMoE.* on a CPU"):
            llm.update_weights({"update_info": {"version_id": "v1"}})
    assert answers(llm) == before
    assert status(llm)["version_id"] is None
