"""Compile passes: byte for byte against references written from the public descriptions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from compile_reference import block_scaled, e4m3_value, row_scaled, to_e4m3
from hypothesis import given
from hypothesis import strategies as st

from refit_mx import CompileError, CompileTargetError, RefitConfigError, TensorSpec, compile_pass
from refit_mx.compile.base import allocate_outputs

WEIGHT = "model.layers.0.mlp.down_proj.weight"
SUFFIX = {"deep_gemm_fp8": "_scale_inv", "cutlass_fp8": "_scale"}
FP8 = [
    compile_pass("deep_gemm_fp8"),
    compile_pass("cutlass_fp8"),
    compile_pass("cutlass_fp8", scales="per_channel"),
]
DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


def spec_of(name, tensor):
    return TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def compiled(compiler, tensors, device="cpu"):
    """Run a pass and return its outputs on the CPU; check that they match its output specs."""
    specs = [spec_of(name, tensor) for name, tensor in tensors.items()]
    compiler.check(specs)
    out = allocate_outputs(compiler, specs, device)
    compiler.run({name: tensor.to(device) for name, tensor in tensors.items()}, out)
    outputs = {**{name: tensors[name] for name in compiler.unchanged(specs)}, **out}
    assert [
        spec_of(name, outputs[name]) for name in (s.name for s in compiler.output_specs(specs))
    ] == (list(compiler.output_specs(specs)))
    assert sorted(outputs) == sorted(spec.name for spec in compiler.output_specs(specs))
    return {name: tensor.cpu() for name, tensor in outputs.items()}


def codes_of(weight):
    return weight.view(torch.uint8).numpy()


def random_matrix(seed, rows, columns, dtype=torch.float32):
    """Return a matrix with zeros and with magnitudes over many powers of two."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=generator)
    exponents = torch.randint(-12, 5, (rows, columns), generator=generator)
    nonzero = torch.rand(rows, columns, generator=generator) > 0.05
    return (torch.ldexp(values, exponents) * nonzero).to(dtype)


def test_reference_agrees_with_torch_on_every_byte():
    codes = torch.arange(256, dtype=torch.uint8)
    decoded = codes.view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(decoded, [e4m3_value(code) for code in range(256)])


@given(value=st.floats(-448, 448, width=32))
def test_rounding_is_to_the_nearest_ties_to_even(value):
    outputs = compiled(compile_pass("cutlass_fp8"), {WEIGHT: torch.tensor([[448.0, value]])})
    assert outputs[WEIGHT + "_scale"].item() == 1
    assert codes_of(outputs[WEIGHT])[0, 1] == to_e4m3(value)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale_format", ["float32", "ue8m0"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "columns"), [(128, 128), (256, 384), (130, 257), (1, 1), (127, 129), (300, 5)]
)
def test_deep_gemm_fp8_equals_the_reference(rows, columns, dtype, scale_format, device):
    matrix = random_matrix(rows * columns, rows, columns, dtype)
    outputs = compiled(
        compile_pass("deep_gemm_fp8", scale_format=scale_format), {WEIGHT: matrix}, device
    )
    codes, scales = block_scaled(matrix.float().numpy(), power_of_two=scale_format == "ue8m0")
    np.testing.assert_array_equal(outputs[WEIGHT + "_scale_inv"].numpy(), scales)
    np.testing.assert_array_equal(codes_of(outputs[WEIGHT]), codes)


def test_ue8m0_scales_are_powers_of_two_and_never_too_small():
    largest = torch.tensor([448.0, 449.0, 447.0, 0.875, 3e38, 1e-4, 448 * 2.0**-20])
    matrix = torch.zeros(128, 128 * len(largest))
    matrix[0, ::128] = largest
    outputs = compiled(compile_pass("deep_gemm_fp8", scale_format="ue8m0"), {WEIGHT: matrix})
    scales = outputs[WEIGHT + "_scale_inv"][0].double()
    assert all(math.frexp(scale)[0] == 0.5 for scale in scales.tolist())
    assert scales[0] == 1
    assert scales[1] == 2
    assert (scales * 448 * (1 + 1e-7) >= largest.double()).all()
    assert (scales * 448 < 2 * largest.double().clamp(min=1e-4) * (1 + 1e-6)).all()


@pytest.mark.parametrize("compiler", FP8)
def test_zeros_stay_zeros_with_positive_scales(compiler):
    outputs = compiled(compiler, {WEIGHT: torch.zeros(130, 130, dtype=torch.bfloat16)})
    assert not codes_of(outputs[WEIGHT]).any()
    scale = outputs[WEIGHT + SUFFIX[compiler.name]]
    assert torch.isfinite(scale).all()
    assert (scale > 0).all()


@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0, 0)])
@pytest.mark.parametrize("compiler", FP8)
def test_empty_slice_is_compiled_to_an_empty_one(compiler, shape):
    outputs = compiled(compiler, {WEIGHT: torch.zeros(shape, dtype=torch.bfloat16)})
    assert tuple(outputs[WEIGHT].shape) == shape


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["column_major", "row_major"])
@pytest.mark.parametrize("scales", ["per_tensor", "per_channel"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "columns"), [(64, 48), (33, 129), (1, 7), (7, 1)])
def test_cutlass_fp8_equals_the_reference(rows, columns, dtype, scales, layout, device):
    matrix = random_matrix(rows + columns, rows, columns, dtype)
    compiler = compile_pass("cutlass_fp8", scales=scales, weight_layout=layout)
    outputs = compiled(compiler, {WEIGHT: matrix}, device)
    codes, expected = row_scaled(matrix.float().numpy(), per_tensor=scales == "per_tensor")
    if scales == "per_tensor":
        expected = expected[0]
    np.testing.assert_array_equal(outputs[WEIGHT + "_scale"].numpy(), expected)
    np.testing.assert_array_equal(
        codes_of(outputs[WEIGHT]), codes if layout == "column_major" else codes.T
    )


@pytest.mark.parametrize("layout", ["column_major", "row_major"])
def test_operand_b_has_the_requested_memory_layout(layout):
    matrix = random_matrix(3, 16, 48)
    weight = compiled(compile_pass("cutlass_fp8", weight_layout=layout), {WEIGHT: matrix})[WEIGHT]
    operand = weight.t() if layout == "column_major" else weight
    assert operand.shape == (48, 16)
    assert operand.stride() == ((1, 48) if layout == "column_major" else (16, 1))
    # It is the operand of x @ b in either memory layout.
    rows = compiled(compile_pass("cutlass_fp8"), {WEIGHT: matrix})[WEIGHT].float()
    assert torch.equal(torch.eye(48) @ operand.float(), rows.t())


@pytest.mark.parametrize(
    "compiler",
    [
        *FP8,
        compile_pass("deep_gemm_fp8", scale_format="ue8m0"),
        compile_pass("cutlass_fp8", scales="per_channel", weight_layout="row_major"),
    ],
)
def test_stack_of_experts_compiles_like_each_expert(compiler):
    name = "model.layers.0.mlp.experts.w13_weight"
    stack = torch.stack([random_matrix(seed, 140, 70, torch.bfloat16) for seed in range(3)])
    suffix = SUFFIX[compiler.name]
    complete = compiled(compiler, {name: stack})
    for i, matrix in enumerate(stack):
        alone = compiled(compiler, {WEIGHT: matrix})
        assert torch.equal(
            codes := complete[name][i].view(torch.uint8), alone[WEIGHT].view(torch.uint8)
        )
        assert codes.any()
        assert torch.equal(
            complete[name + suffix][i].reshape(-1), alone[WEIGHT + suffix].reshape(-1)
        )


@pytest.mark.parametrize("compiler", [*FP8, compile_pass("cutlass_fp8", weight_layout="row_major")])
def test_bands_of_rows_change_nothing(monkeypatch, compiler):
    matrix = random_matrix(9, 600, 130, torch.bfloat16)
    complete = compiled(compiler, {WEIGHT: matrix})
    monkeypatch.setattr("refit_mx.compile.quantizing.BAND_ELEMENTS", 130 * 128 * 2)
    banded = compiled(compiler, {WEIGHT: matrix})
    assert sorted(complete) == sorted(banded)
    for name in complete:
        assert torch.equal(complete[name].view(torch.uint8), banded[name].view(torch.uint8))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("compiler", FP8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nonfinite_values_are_refused_by_name(compiler, bad, dtype):
    matrix = random_matrix(1, 200, 200, dtype)
    matrix[199, 3] = bad
    with pytest.raises(CompileError, match=WEIGHT):
        compiled(compiler, {"a.weight": random_matrix(2, 4, 4), WEIGHT: matrix})


def test_pass_does_not_write_to_its_input():
    matrix = random_matrix(5, 129, 129)
    before = matrix.clone()
    for compiler in (
        compile_pass("deep_gemm_fp8"),
        compile_pass("cutlass_fp8"),
        compile_pass("hf_raw", dtype="float16"),
    ):
        compiled(compiler, {WEIGHT: matrix})
    assert torch.equal(matrix, before)


def test_strided_input_compiles_like_a_contiguous_one():
    wide = random_matrix(5, 140, 300)
    part = wide[:, 7:147]
    for compiler in FP8[:2]:
        a = compiled(compiler, {WEIGHT: part})[WEIGHT].view(torch.uint8)
        b = compiled(compiler, {WEIGHT: part.contiguous()})[WEIGHT].view(torch.uint8)
        assert torch.equal(a, b)


def test_unselected_tensors_pass_through_unchanged():
    tensors = {
        WEIGHT: random_matrix(1, 8, 8, torch.bfloat16),
        "model.norm.weight": torch.randn(8),
        "model.layers.0.mlp.down_proj.bias": torch.randn(8),
        "model.embed_tokens.weight": torch.randn(16, 8),
        "step": torch.tensor(3),
    }
    for compiler in FP8[:2]:
        specs = [spec_of(name, tensor) for name, tensor in tensors.items()]
        assert compiler.unchanged(specs) == set(tensors) - {WEIGHT}
        # They are also copied if the caller supplies output memory for all of them.
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
def test_default_selects_the_weights_of_linear_layers(name, shape, taken):
    for compiler in FP8[:2]:
        unchanged = compiler.unchanged([TensorSpec(name, "bfloat16", shape)])
        assert unchanged == (set() if taken else {name})


def test_selection_replaces_the_default():
    compiler = compile_pass("cutlass_fp8", selection=lambda spec: spec.name == "lm_head.weight")
    specs = [
        TensorSpec("lm_head.weight", "bfloat16", (8, 8)),
        TensorSpec(WEIGHT, "bfloat16", (8, 8)),
    ]
    assert compiler.unchanged(specs) == {WEIGHT}


@pytest.mark.parametrize("compiler", FP8[:2])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8", "int32"])
def test_non_raw_weights_are_refused(compiler, dtype):
    with pytest.raises(CompileTargetError, match=f"{WEIGHT} is {dtype}"):
        compiler.check([TensorSpec(WEIGHT, dtype, (8, 8))])


@pytest.mark.parametrize("compiler", FP8[:2])
def test_weights_with_scales_are_refused(compiler):
    scale = WEIGHT + SUFFIX[compiler.name]
    with pytest.raises(CompileTargetError, match=scale):
        compiler.check(
            [TensorSpec(WEIGHT, "bfloat16", (8, 8)), TensorSpec(scale, "float32", (1, 1))]
        )


def test_hf_raw_is_the_identity():
    specs = [TensorSpec("a", "float32", (3,)), TensorSpec("b", "int64", ())]
    compiler = compile_pass("hf_raw")
    compiler.check(specs)
    assert compiler.output_specs(specs) == tuple(specs)
    assert compiler.unchanged(specs) == {"a", "b"}
    assert compiler.metadata == {}


@given(values=st.lists(st.floats(width=32), max_size=20))
def test_hf_raw_cast_equals_bitwise_rounding_to_bfloat16(values):
    matrix = np.array(values, np.float32)
    outputs = (
        compiled(compile_pass("hf_raw", dtype="bfloat16"), {"a": torch.from_numpy(matrix)})
        if _fits(matrix)
        else None
    )
    if outputs is None:
        with pytest.raises(CompileError, match="a: has values that are finite"):
            compiled(compile_pass("hf_raw", dtype="bfloat16"), {"a": torch.from_numpy(matrix)})
        return
    bits = matrix.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    cast = outputs["a"].view(torch.int16).numpy().view(np.uint16)
    numbers = ~np.isnan(matrix)
    np.testing.assert_array_equal(cast[numbers], rounded[numbers])
    assert np.isnan(outputs["a"].float().numpy()[~numbers]).all()


def _fits(matrix):
    """Return whether no finite value rounds to an infinity; the largest bfloat16 is 0x7F7F."""
    finite = np.isfinite(matrix)
    return (np.abs(matrix[finite].astype(np.float64)) < (2 - 2.0**-8) * 2.0**127).all()


@pytest.mark.parametrize(("dtype", "value"), [("float16", 70000.0), ("float8_e4m3fn", 500.0)])
def test_hf_raw_refuses_a_cast_that_overflows(dtype, value):
    with pytest.raises(CompileError, match=r"b\.weight"):
        compiled(compile_pass("hf_raw", dtype=dtype), {"b.weight": torch.tensor([1.0, value])})


def test_hf_raw_keeps_integers_and_infinities():
    tensors = {"a": torch.tensor([1.5, math.inf]), "n": torch.tensor([7])}
    outputs = compiled(compile_pass("hf_raw", dtype="float16"), tensors)
    assert outputs["a"].dtype == torch.float16
    assert outputs["a"].tolist() == [1.5, math.inf]
    assert outputs["n"] is tensors["n"]


def test_hf_raw_refuses_to_widen_quantized_values():
    with pytest.raises(CompileTargetError, match="need scales"):
        compile_pass("hf_raw", dtype="bfloat16").check([TensorSpec("a", "float8_e4m3fn", (2,))])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("deep_gemm_fp8", {"scale_format": "int32"}),
        ("cutlass_fp8", {"scales": "per_block"}),
        ("cutlass_fp8", {"weight_layout": "diagonal"}),
        ("hf_raw", {"dtype": "int8"}),
        ("hf_raw", {"color": "red"}),
    ],
)
def test_wrong_options_are_refused(name, options):
    with pytest.raises(RefitConfigError, match=name):
        compile_pass(name, **options)


@pytest.mark.parametrize(
    ("compiler", "promised"),
    [
        (
            compile_pass("deep_gemm_fp8"),
            {"block_rows": 128, "block_columns": 128, "scale_format": "float32"},
        ),
        (compile_pass("deep_gemm_fp8", scale_format="ue8m0"), {"scale_format": "ue8m0"}),
        (compile_pass("cutlass_fp8"), {"scales": "per_tensor", "weight_layout": "column_major"}),
        (compile_pass("cutlass_fp8", scales="per_channel"), {"scales": "per_channel"}),
    ],
)
def test_metadata_describes_the_output_for_kernels(compiler, promised):
    assert promised.items() <= dict(compiler.metadata).items()
    assert compiler.accepts == {"hf_raw"}
