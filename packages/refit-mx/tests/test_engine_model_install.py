"""What a model needs, derived from its own layers, against vLLM's way of loading whole tensors."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from stand_in_model import TinyConfig, TinyForCausalLM, checkpoint, digest_of
from torch import nn

from refit_mx.compile.base import allocate_outputs, compile_pass
from refit_mx.engine.mla import refresh_mla_weights
from refit_mx.engine.model_install import memory_view, model_install
from refit_mx.errors import CompileTargetError, LayoutError
from refit_mx.tensor_types import TensorSpec

CONFIGS = {
    "dense": TinyConfig(),
    "tied": TinyConfig(tied=True),
    "experts": TinyConfig(experts=5),
    "no_bias": TinyConfig(qkv_bias=False, layers=1),
    "one_kv_head": TinyConfig(kv_heads=1),
    "vocabulary_that_divides": TinyConfig(vocab=64),
}


def specs_of(tensors):
    return [
        TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in tensors.items()
    ]


def received(target, published):
    """A target filled part by part, as a receiver would."""
    made = torch.full(target.shape, math.nan).to(getattr(torch, target.dtype))
    for part in target.parts:
        made[part.placed().slices()] = published[part.tensor][part.box.slices()]
    return made


def install(model, published, compiler):
    """The whole way without a network."""
    found = model_install(model, specs_of(published), compiler)
    tensors = {target.name: received(target, published) for target in found.targets}
    specs = specs_of(tensors)
    out = allocate_outputs(compiler, specs)
    compiler.run(tensors, out)
    for name in compiler.unchanged(specs):
        out[name] = tensors[name]
    assert set(out) == set(found.live)
    for name, live in found.live.items():
        live.copy_(out[name])
    return found


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_every_rank_gets_what_loading_whole_tensors_gives_it(config, tp_size):
    tensors = checkpoint(config, 7)
    for rank in range(tp_size):
        loaded = TinyForCausalLM(config, tp_size, rank)
        loaded.load_weights(tensors.items())
        installed = TinyForCausalLM(config, tp_size, rank)
        install(installed, tensors, compile_pass("hf_raw"))
        assert digest_of(installed) == digest_of(loaded)


def test_stacked_experts_are_taken_from_one_tensor_each():
    config = TinyConfig(experts=5, layers=1)
    tensors = checkpoint(config, 7)
    stacked = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for projection in ("gate_proj", "up_proj", "down_proj"):
        stacked[f"model.layers.0.mlp.experts.{projection}"] = torch.stack(
            [tensors[f"model.layers.0.mlp.experts.{e}.{projection}.weight"] for e in range(5)]
        )
    for rank in range(2):
        loaded = TinyForCausalLM(config, 2, rank)
        loaded.load_weights(tensors.items())
        installed = TinyForCausalLM(config, 2, rank)
        install(installed, stacked, compile_pass("hf_raw"))
        assert digest_of(installed) == digest_of(loaded)


def test_experts_divided_over_ranks_each_get_their_rows_and_columns():
    """Tensor parallelism within experts: rows of gate and up, columns of down."""
    config = TinyConfig(experts=3, layers=1)
    tensors = checkpoint(config, 7)
    half = config.intermediate // 2
    for rank in range(2):
        model = TinyForCausalLM(config)
        moe = model.model.layers[0].mlp.experts
        moe.tp_size, moe.tp_rank, moe.expert_map = 2, rank, None
        moe.w13_weight = nn.Parameter(
            torch.zeros(3, 2 * half, config.hidden, dtype=torch.bfloat16), requires_grad=False
        )
        moe.w2_weight = nn.Parameter(
            torch.zeros(3, config.hidden, half, dtype=torch.bfloat16), requires_grad=False
        )
        install(model, tensors, compile_pass("hf_raw"))
        mine = slice(rank * half, rank * half + half)
        for e in range(3):
            name = f"model.layers.0.mlp.experts.{e}"
            gate, up, down = (tensors[f"{name}.{n}_proj.weight"] for n in ("gate", "up", "down"))
            assert torch.equal(moe.w13_weight[e], torch.cat([gate[mine], up[mine]]))
            assert torch.equal(moe.w2_weight[e], down[:, mine])


def with_fp8_parameters(model, compiler, *, transposed):
    """As vLLM leaves a model after loading for fp8 kernels: other weights, and scales beside."""
    linear = [
        (name, module, leaf)
        for name, module in model.named_modules()
        for leaf in list(module._parameters)
        if [
            *compiler.output_specs(
                [TensorSpec(f"{name}.{leaf}", "bfloat16", tuple(module._parameters[leaf].shape))]
            )
        ][1:]
    ]
    for name, module, leaf in linear:
        weight = module._parameters[leaf]
        made = compiler.output_specs(
            [TensorSpec(f"{name}.{leaf}", "bfloat16", tuple(weight.shape))]
        )
        values = torch.zeros(made[0].shape).to(torch.float8_e4m3fn)
        module._parameters[leaf] = nn.Parameter(
            values.transpose(-1, -2) if transposed else values, requires_grad=False
        )
        scale = made[1].name.rpartition(".")[2]
        module.register_parameter(
            scale, nn.Parameter(torch.zeros(made[1].shape), requires_grad=False)
        )
    return [f"{name}.{leaf}" for name, _, leaf in linear]


@pytest.mark.parametrize("config", [TinyConfig(), TinyConfig(experts=3)], ids=["dense", "experts"])
@pytest.mark.parametrize(
    ("target", "options", "transposed"),
    [
        ("deep_gemm_fp8", {}, False),
        ("deep_gemm_fp8", {"scale_format": "ue8m0"}, False),
        ("cutlass_fp8", {}, True),
        ("cutlass_fp8", {"scales": "per_channel"}, True),
        ("cutlass_fp8", {"weight_layout": "row_major"}, False),
    ],
)
def test_an_fp8_model_gets_its_own_slices_compiled(config, target, options, transposed):
    compiler = compile_pass(target, **options)
    tensors = checkpoint(config, 7)
    for rank in range(2):
        raw = TinyForCausalLM(config, 2, rank)
        raw.load_weights(tensors.items())
        expected = {name: p.detach() for name, p in raw.named_parameters()}
        out = allocate_outputs(compiler, specs_of(expected))
        compiler.run(expected, out)
        model = TinyForCausalLM(config, 2, rank)
        quantised = with_fp8_parameters(model, compiler, transposed=transposed)
        assert quantised
        install(model, tensors, compiler)
        live = dict(model.named_parameters())
        for name in expected:
            made = out.get(name, expected[name])
            if name in quantised and transposed:
                made = made.transpose(-1, -2)
                assert live[name].stride()[-2:] == made.stride()[-2:]
            if made.dtype == torch.float8_e4m3fn:
                assert torch.equal(live[name].float(), made.float())
            else:
                assert torch.equal(live[name], made)
        for name in quantised:
            scale = name + compiler.scale_suffix
            assert torch.equal(live[scale], out[scale])
            assert (live[scale] > 0).all()


def test_a_stage_of_a_pipeline_takes_its_own_and_says_what_it_left():
    tensors = checkpoint(TinyConfig(), 7)
    model = TinyForCausalLM(TinyConfig())
    del model.model.layers[1]
    del model.model.embed_tokens
    found = model_install(model, specs_of(tensors), compile_pass("hf_raw"))
    assert {name for name in tensors if "layers.1." in name} | {"model.embed_tokens.weight"} == set(
        found.unused
    )


def test_names_of_the_checkpoint_are_mapped_as_the_model_says():
    tensors = checkpoint(TinyConfig(), 7)
    model = TinyForCausalLM(TinyConfig())
    loaded = TinyForCausalLM(TinyConfig())
    loaded.load_weights(tensors.items())
    model.hf_to_vllm_mapper = SimpleNamespace(
        _map_name=lambda name: None if name.startswith("vision.") else name.removeprefix("text.")
    )
    published = {f"text.{name}": tensor for name, tensor in tensors.items()}
    found = install(model, {**published, "vision.weight": torch.zeros(3)}, compile_pass("hf_raw"))
    assert digest_of(model) == digest_of(loaded)
    assert found.unused == ("vision.weight",)


@pytest.mark.parametrize(
    ("missing", "named"),
    [
        ("model.norm.weight", "model.norm.weight"),
        ("model.layers.1.self_attn.k_proj.weight", r"layers\.1\.self_attn\.k_proj\.weight"),
        ("lm_head.weight", "lm_head.weight"),
    ],
)
def test_a_parameter_that_gets_nothing_is_named(missing, named):
    tensors = checkpoint(TinyConfig(), 7)
    del tensors[missing]
    with pytest.raises(LayoutError, match=named):
        model_install(TinyForCausalLM(TinyConfig()), specs_of(tensors), compile_pass("hf_raw"))


@pytest.mark.parametrize("name", ["o_proj.weight", "q_proj.weight", "input_layernorm.weight"])
def test_a_tensor_of_another_shape_is_refused(name):
    tensors = checkpoint(TinyConfig(), 7)
    full = next(n for n in tensors if n.endswith(name))
    tensors[full] = torch.cat([tensors[full], tensors[full]])
    with pytest.raises(LayoutError, match=name.partition("_")[0]):
        model_install(TinyForCausalLM(TinyConfig()), specs_of(tensors), compile_pass("hf_raw"))


def test_a_tensor_of_another_dtype_is_refused_unless_a_pass_casts_it():
    tensors = {name: t.float() for name, t in checkpoint(TinyConfig(), 7).items()}
    model = TinyForCausalLM(TinyConfig())
    with pytest.raises(LayoutError, match="compile pass"):
        model_install(model, specs_of(tensors), compile_pass("hf_raw"))
    install(model, tensors, compile_pass("hf_raw", dtype="bfloat16"))
    loaded = TinyForCausalLM(TinyConfig())
    loaded.load_weights(checkpoint(TinyConfig(), 7).items())
    assert digest_of(model) == digest_of(loaded)


def test_a_pass_that_cannot_compile_what_is_published_is_told_before_anything_moves():
    tensors = checkpoint(TinyConfig(), 7)
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    with pytest.raises(CompileTargetError, match="float8_e4m3fn"):
        model_install(TinyForCausalLM(TinyConfig()), specs_of(tensors), compile_pass("cutlass_fp8"))


def test_ranks_that_do_not_divide_are_refused():
    config = TinyConfig()
    model = TinyForCausalLM(config)
    model.model.layers[0].mlp.down_proj.tp_size = 5
    with pytest.raises(LayoutError, match="5 ranks"):
        model_install(model, specs_of(checkpoint(config, 7)), compile_pass("hf_raw"))


def test_a_parameter_strided_in_another_way_is_refused():
    with pytest.raises(LayoutError, match="column-major"):
        memory_view(torch.zeros(8, 8)[::2, ::2])


def test_a_model_without_mla_is_left_alone():
    model = TinyForCausalLM(TinyConfig())
    before = digest_of(model)
    assert refresh_mla_weights(model) == 0
    assert digest_of(model) == before


def mla_layer(heads=3, width_k=4, width_v=5, rank=6):
    layer = nn.Module()
    layer.kv_b_proj = nn.Linear(rank, heads * (width_k + width_v), bias=False)
    layer.W_UK_T = torch.zeros(heads, width_k, rank)
    layer.W_UV = torch.zeros(heads, rank, width_v)
    return layer


def test_absorbed_weights_of_mla_follow_the_projection_in_place():
    model = nn.Sequential(mla_layer(), nn.Linear(2, 2), mla_layer())
    layer, address = model[0], model[0].W_UV.data_ptr()
    assert refresh_mla_weights(model) == 2
    weight = layer.kv_b_proj.weight
    for head in range(3):
        for p in range(4):
            assert torch.equal(layer.W_UK_T[head, p], weight[head * 9 + p])
        for v in range(5):
            assert torch.equal(layer.W_UV[head, :, v], weight[head * 9 + 4 + v])
    assert layer.W_UV.data_ptr() == address


@pytest.mark.parametrize("missing", ["W_UV", "W_UK_T"])
def test_a_layer_of_mla_with_one_absorbed_weight_has_it_made(missing):
    layer, whole = mla_layer(), mla_layer()
    whole.kv_b_proj = layer.kv_b_proj
    refresh_mla_weights(whole)
    delattr(layer, missing)
    assert refresh_mla_weights(layer) == 1
    there = "W_UV" if missing == "W_UK_T" else "W_UK_T"
    assert torch.equal(getattr(layer, there), getattr(whole, there))
    assert getattr(layer, there).any()


def test_a_projection_of_mla_that_does_not_fit_is_refused():
    layer = mla_layer()
    layer.W_UV = torch.zeros(3, 6, 5, dtype=torch.bfloat16)
    with pytest.raises(LayoutError, match="kv_b_proj"):
        refresh_mla_weights(layer)
