"""Compile passes: byte for byte against references written from the public descriptions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from compile_reference import block_scaled, e4m3_value, row_scaled, to_e4m3, values_of
from hypothesis import given, settings
from hypothesis import strategies as st

from refit_mx.compile import quantising
from refit_mx.compile.base import allocate_outputs, compile_pass
from refit_mx.compile.cutlass_fp8 import CutlassFp8
from refit_mx.compile.deep_gemm_fp8 import DeepGemmFp8
from refit_mx.compile.hf_raw import HfRaw
from refit_mx.compile.selection import linear_weights, names_matching
from refit_mx.errors import CompileError, CompileTargetError, RefitConfigError
from refit_mx.tensor_types import TensorSpec

WEIGHT = "model.layers.0.mlp.down_proj.weight"
DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


def spec_of(name, tensor):
    return TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def compiled(compiler, tensors, device="cpu"):
    """What a pass makes, on the CPU, with each tensor of the spec that it announced."""
    specs = [spec_of(name, tensor) for name, tensor in tensors.items()]
    compiler.check(specs)
    out = allocate_outputs(compiler, specs, device)
    compiler.run({name: tensor.to(device) for name, tensor in tensors.items()}, out)
    made = {**{name: tensors[name] for name in compiler.unchanged(specs)}, **out}
    assert [
        spec_of(name, made[name]) for name in (s.name for s in compiler.output_specs(specs))
    ] == (list(compiler.output_specs(specs)))
    assert sorted(made) == sorted(spec.name for spec in compiler.output_specs(specs))
    return {name: tensor.cpu() for name, tensor in made.items()}


def codes_of(weight):
    return weight.view(torch.uint8).numpy()


def random_matrix(seed, rows, columns, dtype=torch.float32):
    """Magnitudes over many powers of two, zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=generator)
    exponents = torch.randint(-12, 5, (rows, columns), generator=generator)
    kept = torch.rand(rows, columns, generator=generator) > 0.05
    return (torch.ldexp(values, exponents) * kept).to(dtype)


def test_the_reference_knows_all_bytes_that_torch_knows():
    codes = torch.arange(256, dtype=torch.uint8)
    theirs = codes.view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(theirs, [e4m3_value(code) for code in range(256)])


@given(value=st.floats(-1000, 1000, width=32))
def test_rounding_is_to_nearest_ties_to_even_and_saturates(value):
    ours = quantising.to_e4m3(torch.tensor([value]))
    assert codes_of(ours)[0] == to_e4m3(value)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale_format", ["float32", "ue8m0"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "columns"), [(128, 128), (256, 384), (130, 257), (1, 1), (127, 129), (300, 5)]
)
def test_deep_gemm_fp8_equals_the_reference(rows, columns, dtype, scale_format, device):
    matrix = random_matrix(rows * columns, rows, columns, dtype)
    made = compiled(DeepGemmFp8(scale_format=scale_format), {WEIGHT: matrix}, device)
    codes, scales = block_scaled(matrix.float().numpy(), power_of_two=scale_format == "ue8m0")
    np.testing.assert_array_equal(made[WEIGHT + "_scale_inv"].numpy(), scales)
    np.testing.assert_array_equal(codes_of(made[WEIGHT]), codes)


@settings(max_examples=25)
@given(
    rows=st.integers(1, 200),
    columns=st.integers(1, 200),
    seed=st.integers(0, 2**31),
    power_of_two=st.booleans(),
)
def test_a_block_gets_its_values_back_within_the_error_of_e4m3(rows, columns, seed, power_of_two):
    matrix = random_matrix(seed, rows, columns)
    scale_format = "ue8m0" if power_of_two else "float32"
    made = compiled(DeepGemmFp8(scale_format=scale_format), {WEIGHT: matrix})
    scales = made[WEIGHT + "_scale_inv"].double().numpy()
    spread = np.kron(scales, np.ones((128, 128)))[:rows, :columns]
    back = values_of(codes_of(made[WEIGHT])) * spread
    exact = matrix.double().numpy()
    # Half a unit in the last of three bits of mantissa, or of the smallest subnormal, 2^-9; and the
    # float32 arithmetic on the way.
    bound = np.maximum(np.abs(exact) * 2.0**-4, spread * 2.0**-10) * (1 + 1e-5)
    assert (np.abs(back - exact) <= bound).all()


def test_ue8m0_scales_are_powers_of_two_and_never_too_small():
    largest = torch.tensor([448.0, 449.0, 447.0, 0.875, 3e38, 1e-4, 448 * 2.0**-20])
    matrix = torch.zeros(128, 128 * len(largest))
    matrix[0, ::128] = largest
    made = compiled(DeepGemmFp8(scale_format="ue8m0"), {WEIGHT: matrix})
    scales = made[WEIGHT + "_scale_inv"][0].double()
    assert all(math.frexp(scale)[0] == 0.5 for scale in scales.tolist())
    assert scales[0] == 1
    assert scales[1] == 2
    assert (scales * 448 * (1 + 1e-7) >= largest.double()).all()
    assert (scales * 448 < 2 * largest.double().clamp(min=1e-4) * (1 + 1e-6)).all()


@pytest.mark.parametrize(
    "compiler", [DeepGemmFp8(), CutlassFp8(), CutlassFp8(scales="per_channel")]
)
def test_zeros_stay_zeros_with_scales_that_are_not(compiler):
    made = compiled(compiler, {WEIGHT: torch.zeros(130, 130, dtype=torch.bfloat16)})
    assert not codes_of(made[WEIGHT]).any()
    scale = made[WEIGHT + compiler.scale_suffix]
    assert torch.isfinite(scale).all()
    assert (scale > 0).all()


@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0, 0)])
@pytest.mark.parametrize(
    "compiler", [DeepGemmFp8(), CutlassFp8(), CutlassFp8(scales="per_channel")]
)
def test_an_empty_slice_is_compiled_to_an_empty_one(compiler, shape):
    made = compiled(compiler, {WEIGHT: torch.zeros(shape, dtype=torch.bfloat16)})
    assert tuple(made[WEIGHT].shape) == shape


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["column_major", "row_major"])
@pytest.mark.parametrize("scales", ["per_tensor", "per_channel"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "columns"), [(64, 48), (33, 129), (1, 7), (7, 1)])
def test_cutlass_fp8_equals_the_reference(rows, columns, dtype, scales, layout, device):
    matrix = random_matrix(rows + columns, rows, columns, dtype)
    compiler = CutlassFp8(scales=scales, weight_layout=layout)
    made = compiled(compiler, {WEIGHT: matrix}, device)
    codes, expected = row_scaled(matrix.float().numpy(), whole=scales == "per_tensor")
    if scales == "per_tensor":
        expected = expected[0]
    np.testing.assert_array_equal(made[WEIGHT + "_scale"].numpy(), expected)
    np.testing.assert_array_equal(
        codes_of(made[WEIGHT]), codes if layout == "column_major" else codes.T
    )


@pytest.mark.parametrize("layout", ["column_major", "row_major"])
def test_operand_b_lies_in_memory_as_the_layout_says(layout):
    matrix = random_matrix(3, 16, 48)
    weight = compiled(CutlassFp8(weight_layout=layout), {WEIGHT: matrix})[WEIGHT]
    operand = weight.t() if layout == "column_major" else weight
    assert operand.shape == (48, 16)
    assert operand.stride() == ((1, 48) if layout == "column_major" else (16, 1))
    # It is the operand of x @ b whichever way it lies.
    rows = compiled(CutlassFp8(), {WEIGHT: matrix})[WEIGHT].float()
    assert torch.equal(torch.eye(48) @ operand.float(), rows.t())


@pytest.mark.parametrize(
    "make",
    [
        DeepGemmFp8,
        lambda: DeepGemmFp8(scale_format="ue8m0"),
        CutlassFp8,
        lambda: CutlassFp8(scales="per_channel"),
        lambda: CutlassFp8(scales="per_channel", weight_layout="row_major"),
    ],
)
def test_a_stack_of_experts_is_compiled_as_each_of_them_alone(make):
    name = "model.layers.0.mlp.experts.w13_weight"
    stack = torch.stack([random_matrix(seed, 140, 70, torch.bfloat16) for seed in range(3)])
    suffix = make().scale_suffix
    whole = compiled(make(), {name: stack})
    for i, matrix in enumerate(stack):
        alone = compiled(make(), {WEIGHT: matrix})
        assert torch.equal(
            codes := whole[name][i].view(torch.uint8), alone[WEIGHT].view(torch.uint8)
        )
        assert codes.any()
        assert torch.equal(whole[name + suffix][i].reshape(-1), alone[WEIGHT + suffix].reshape(-1))


@pytest.mark.parametrize(
    "compiler",
    [
        DeepGemmFp8(),
        CutlassFp8(scales="per_channel"),
        CutlassFp8(),
        CutlassFp8(weight_layout="row_major"),
    ],
)
def test_bands_of_rows_change_nothing(monkeypatch, compiler):
    matrix = random_matrix(9, 600, 130, torch.bfloat16)
    whole = compiled(compiler, {WEIGHT: matrix})
    monkeypatch.setattr(quantising, "BAND_ELEMENTS", 130 * 128 * 2)
    banded = compiled(compiler, {WEIGHT: matrix})
    assert sorted(whole) == sorted(banded)
    for name in whole:
        assert torch.equal(whole[name].view(torch.uint8), banded[name].view(torch.uint8))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "compiler", [DeepGemmFp8(), CutlassFp8(), CutlassFp8(scales="per_channel")]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_that_are_not_finite_are_refused_by_name(compiler, bad, dtype):
    matrix = random_matrix(1, 200, 200, dtype)
    matrix[199, 3] = bad
    with pytest.raises(CompileError, match=WEIGHT):
        compiled(compiler, {"a.weight": random_matrix(2, 4, 4), WEIGHT: matrix})


def test_a_pass_does_not_write_to_its_input():
    matrix = random_matrix(5, 129, 129)
    before = matrix.clone()
    for compiler in (DeepGemmFp8(), CutlassFp8(), HfRaw(dtype="float16")):
        compiled(compiler, {WEIGHT: matrix})
    assert torch.equal(matrix, before)


def test_a_strided_input_gives_the_bytes_of_the_contiguous_one():
    wide = random_matrix(5, 140, 300)
    part = wide[:, 7:147]
    for compiler in (DeepGemmFp8(), CutlassFp8()):
        a = compiled(compiler, {WEIGHT: part})[WEIGHT].view(torch.uint8)
        b = compiled(compiler, {WEIGHT: part.contiguous()})[WEIGHT].view(torch.uint8)
        assert torch.equal(a, b)


def test_what_is_not_selected_passes_through_unchanged():
    tensors = {
        WEIGHT: random_matrix(1, 8, 8, torch.bfloat16),
        "model.norm.weight": torch.randn(8),
        "model.layers.0.mlp.down_proj.bias": torch.randn(8),
        "model.embed_tokens.weight": torch.randn(16, 8),
        "step": torch.tensor(3),
    }
    for compiler in (DeepGemmFp8(), CutlassFp8()):
        specs = [spec_of(name, tensor) for name, tensor in tensors.items()]
        assert compiler.unchanged(specs) == set(tensors) - {WEIGHT}
        # Also when the caller wants all of it in memory of its own.
        out = {
            spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
            for spec in compiler.output_specs(specs)
        }
        compiler.run(tensors, out)
        for name in compiler.unchanged(specs):
            assert torch.equal(out[name], tensors[name])


@pytest.mark.parametrize(
    ("name", "shape", "taken"),
    [
        (WEIGHT, (8, 8), True),
        ("model.layers.3.self_attn.qkv_proj.weight", (8, 8), True),
        ("model.layers.3.mlp.gate_up_proj.weight", (8, 8), True),
        ("model.layers.3.mlp.gate_proj.weight", (8, 8), True),
        ("model.layers.3.mlp.experts.7.down_proj.weight", (8, 8), True),
        ("model.layers.3.mlp.experts.w2_weight", (4, 8, 8), True),
        ("model.layers.3.mlp.experts.w13_weight", (4, 8, 8), True),
        ("model.layers.3.mlp.gate.weight", (4, 8), False),
        ("model.layers.3.block_sparse_moe.gate.weight", (4, 8), False),
        ("model.layers.3.mlp.shared_expert_gate.weight", (1, 8), False),
        ("model.layers.3.input_layernorm.weight", (8,), False),
        ("model.layers.3.self_attn.q_norm.weight", (8,), False),
        ("model.layers.3.some_norm.weight", (8, 8), False),
        ("model.embed_tokens.weight", (8, 8), False),
        ("transformer.wte.weight", (8, 8), False),
        ("lm_head.weight", (8, 8), False),
        ("model.layers.3.self_attn.q_proj.bias", (8,), False),
        ("visual.conv.weight", (4, 8, 8), False),
        ("model.layers.0.conv.weight", (4, 1, 8, 8), False),
    ],
)
def test_the_default_takes_the_weights_of_linear_layers(name, shape, taken):
    assert linear_weights(TensorSpec(name, "bfloat16", shape)) is taken


def test_a_pattern_selects_instead_of_the_default():
    compiler = CutlassFp8(selection=names_matching(r"lm_head\.weight"))
    specs = [
        TensorSpec("lm_head.weight", "bfloat16", (8, 8)),
        TensorSpec(WEIGHT, "bfloat16", (8, 8)),
    ]
    assert compiler.unchanged(specs) == {WEIGHT}


@pytest.mark.parametrize("compiler", [DeepGemmFp8(), CutlassFp8()])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8", "int32"])
def test_weights_that_are_not_raw_are_refused_before_anything_moves(compiler, dtype):
    with pytest.raises(CompileTargetError, match=f"{WEIGHT} is {dtype}"):
        compiler.check([TensorSpec(WEIGHT, dtype, (8, 8))])


@pytest.mark.parametrize("compiler", [DeepGemmFp8(), CutlassFp8()])
def test_weights_that_come_with_scales_are_refused(compiler):
    scale = WEIGHT + compiler.scale_suffix
    with pytest.raises(CompileTargetError, match=scale):
        compiler.check(
            [TensorSpec(WEIGHT, "bfloat16", (8, 8)), TensorSpec(scale, "float32", (1, 1))]
        )


def test_hf_raw_is_the_identity():
    specs = [TensorSpec("a", "float32", (3,)), TensorSpec("b", "int64", ())]
    compiler = HfRaw()
    compiler.check(specs)
    assert compiler.output_specs(specs) == tuple(specs)
    assert compiler.unchanged(specs) == {"a", "b"}
    assert compiler.metadata == {}


@given(values=st.lists(st.floats(width=32), max_size=20))
def test_hf_raw_casts_as_rounding_to_bfloat16_by_its_bits(values):
    matrix = np.array(values, np.float32)
    made = (
        compiled(HfRaw(dtype="bfloat16"), {"a": torch.from_numpy(matrix)})
        if _fits(matrix)
        else None
    )
    if made is None:
        with pytest.raises(CompileError, match="a: has values that are finite"):
            compiled(HfRaw(dtype="bfloat16"), {"a": torch.from_numpy(matrix)})
        return
    bits = matrix.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    ours = made["a"].view(torch.int16).numpy().view(np.uint16)
    numbers = ~np.isnan(matrix)
    np.testing.assert_array_equal(ours[numbers], rounded[numbers])
    assert np.isnan(made["a"].float().numpy()[~numbers]).all()


def _fits(matrix):
    """Whether no finite value rounds to an infinity; the largest bfloat16 is 0x7F7F."""
    finite = np.isfinite(matrix)
    return (np.abs(matrix[finite].astype(np.float64)) < (2 - 2.0**-8) * 2.0**127).all()


@pytest.mark.parametrize(("dtype", "value"), [("float16", 70000.0), ("float8_e4m3fn", 500.0)])
def test_hf_raw_refuses_a_cast_that_overflows(dtype, value):
    with pytest.raises(CompileError, match=r"b\.weight"):
        compiled(HfRaw(dtype=dtype), {"b.weight": torch.tensor([1.0, value])})


def test_hf_raw_leaves_integers_and_carries_what_was_infinite():
    tensors = {"a": torch.tensor([1.5, math.inf]), "n": torch.tensor([7])}
    made = compiled(HfRaw(dtype="float16"), tensors)
    assert made["a"].dtype == torch.float16
    assert made["a"].tolist() == [1.5, math.inf]
    assert made["n"] is tensors["n"]


def test_hf_raw_refuses_to_widen_quantised_values():
    with pytest.raises(CompileTargetError, match="need scales"):
        HfRaw(dtype="bfloat16").check([TensorSpec("a", "float8_e4m3fn", (2,))])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("deep_gemm_fp8", {"scale_format": "int32"}),
        ("cutlass_fp8", {"scales": "per_block"}),
        ("cutlass_fp8", {"weight_layout": "diagonal"}),
        ("hf_raw", {"dtype": "int8"}),
        ("hf_raw", {"colour": "red"}),
    ],
)
def test_wrong_options_are_refused(name, options):
    with pytest.raises(RefitConfigError, match=name):
        compile_pass(name, **options)


@pytest.mark.parametrize(
    ("compiler", "promised"),
    [
        (DeepGemmFp8(), {"block_rows": 128, "block_columns": 128, "scale_format": "float32"}),
        (DeepGemmFp8(scale_format="ue8m0"), {"scale_format": "ue8m0"}),
        (CutlassFp8(), {"scales": "per_tensor", "weight_layout": "column_major"}),
        (CutlassFp8(scales="per_channel"), {"scales": "per_channel"}),
    ],
)
def test_metadata_tells_apart_what_a_kernel_must_tell_apart(compiler, promised):
    assert promised.items() <= dict(compiler.metadata).items()
    assert compiler.accepts == {"hf_raw"}
