"""Traced loaders, the fence of a model with mixed weights, and refused update infos.

These tests use internals, since the engine itself needs vLLM; see integration/vllm.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from refit_mx import FencedError, LayoutError, TargetTensor, TensorSpec
from refit_mx.engine.fence import ModelFence
from refit_mx.engine.infos import MxInitInfo, MxUpdateInfo
from refit_mx.engine.loader_trace import locate_view, trace_loaders, traced_target


@given(st.data())
def test_view_made_by_narrowing_is_located(data):
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    base = torch.empty(shape, device="meta")
    view, start, size = base, [], []
    for axis, length in enumerate(shape):
        first = data.draw(st.integers(0, length - 1))
        start.append(first)
        size.append(data.draw(st.integers(1, length - first)))
        view = view.narrow(axis, first, size[-1])
    located = locate_view(base, view)
    assert located is not None
    # On an axis of one element the start is 0, whatever its stride.
    assert located.start == tuple(start)
    assert located.size == tuple(size)
    assert located.order == tuple(axis for axis in range(len(shape)) if size[axis] > 1)


@pytest.mark.parametrize(
    "view",
    [
        lambda base: base[::2],
        lambda base: base.view(-1),
        lambda base: base.expand(2, 4, 6),
        lambda base: base.view(2, 2, 6),
    ],
)
def test_view_without_a_box_is_not_located(view):
    base = torch.empty(4, 6, device="meta")
    assert locate_view(base, view(base)) is None


def test_transposed_view_is_located_with_its_order():
    base = torch.empty(4, 6, device="meta")
    located = locate_view(base, base[1:3].t())
    assert located is not None
    assert (located.start, located.size, located.order) == ((1, 0), (2, 6), (1, 0))


Load = Callable[[dict[str, torch.Tensor], torch.Tensor], object]


def target_of(load: Load, parameter: torch.Tensor) -> TargetTensor:
    """Return the target of a parameter whose loader gets tensors ``a`` (4, 6) and ``b`` (2, 6)."""
    published = [TensorSpec("a", "float32", (4, 6)), TensorSpec("b", "float32", (2, 6))]

    def load_weights(weights):
        load(dict(weights), parameter)

    traced = trace_loaders(load_weights, {"p": parameter}, published)
    return traced_target("p", traced["p"], parameter, {spec.name: spec for spec in published})


def test_rows_of_two_tensors_become_parts():
    def load(tensors, parameter):
        parameter[:2].copy_(tensors["a"][2:])
        parameter[2:].copy_(tensors["b"])

    target = target_of(load, torch.empty(4, 6, device="meta"))
    assert [(part.tensor, part.box.start, part.box.shape, part.at) for part in target.parts] == [
        ("a", (2, 0), (2, 6), (0, 0)),
        ("b", (0, 0), (2, 6), (2, 0)),
    ]
    assert target.shape == (4, 6)


def test_zero_filled_rows_are_left_out():
    def load(tensors, parameter):
        parameter[:4].copy_(tensors["a"])
        parameter[4:].zero_()

    assert target_of(load, torch.empty(8, 6, device="meta")).shape == (4, 6)


def test_scalar_that_is_first_filled_with_zero_is_a_target():
    parameter, spec = torch.empty((), device="meta"), TensorSpec("scale", "float32", ())

    def load_weights(weights):
        parameter.zero_()
        parameter.copy_(dict(weights)["scale"])

    traced = trace_loaders(load_weights, {"p": parameter}, [spec])
    assert traced_target("p", traced["p"], parameter, {"scale": spec}).shape == ()


def test_parameter_with_memory_is_not_written():
    parameter = torch.zeros(4, 6)
    target_of(lambda tensors, p: p.copy_(tensors["a"]), parameter)
    assert not parameter.any()


@pytest.mark.parametrize(
    ("load", "says"),
    [
        (lambda tensors, p: p[:2].copy_(tensors["b"]), "p"),  # the other rows come from nowhere
        (lambda tensors, p: p.copy_(tensors["a"] + 1), "computes what it stores"),
        (lambda tensors, p: p.view(6, 4).copy_(tensors["a"].t()), "reshapes a"),
        (lambda tensors, p: p.copy_(tensors["a"]).mul_(2), "calls aten.mul_"),
        (lambda tensors, p: p.fill_(1), "calls aten.fill_"),
        (lambda tensors, p: tensors["c"], "fails at"),
    ],
)
def test_loader_that_does_more_than_copy_is_refused(load, says):
    with pytest.raises(LayoutError, match=says):
        target_of(load, torch.empty(4, 6, device="meta"))


# The fence


class Model(nn.Module):
    """Model that counts its computations."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 2))
        self.computed = 0

    def forward(self, x):
        self.computed += 1
        return x

    def compute_logits(self, hidden):
        self.computed += 1
        return hidden


@pytest.fixture
def model():
    return Model()


def assert_refuses(model, why):
    before = model.computed
    for call in (model, model.compute_logits):
        with pytest.raises(FencedError, match=why):
            call(torch.ones(1))
    assert model.computed == before


def assert_computes(model):
    before = model.computed
    model(torch.ones(1))
    model.compute_logits(torch.ones(1))
    assert model.computed == before + 2


def test_closed_fence_raises_its_reason(model):
    fence = ModelFence(model, lambda: "torn by a test")
    assert_computes(model)
    fence.close()
    fence.close()
    assert_refuses(model, "torn by a test; the weights are a mixture")
    fence.open()
    fence.open()
    assert_computes(model)


def test_opened_fence_restores_the_models_methods(model):
    calls = []
    model.compute_logits = original = calls.append
    fence = ModelFence(model, lambda: "torn")
    fence.close()
    with pytest.raises(FencedError):
        model.compute_logits(1)
    fence.open()
    assert model.compute_logits is original
    assert not model._forward_pre_hooks


def test_model_without_logits_is_fenced_by_its_call():
    model = nn.Linear(2, 2)
    fence = ModelFence(model, lambda: "torn")
    fence.close()
    with pytest.raises(FencedError, match="torn"):
        model(torch.ones(1, 2))
    assert not hasattr(model, "compute_logits")
    fence.open()
    model(torch.ones(1, 2))


# Arguments of a worker


@pytest.mark.parametrize(
    "info",
    [
        {},
        {"abort": True, "version_id": "v1"},
        {"abort": True, "background": True},
        {"version_id": "v1", "timeout_s": 0},
        {"version_id": "v1", "timeout_s": "30"},
    ],
)
def test_wrong_update_infos_are_refused(info):
    with pytest.raises(ValueError, match="update_info"):
        MxUpdateInfo(**info)


@pytest.mark.parametrize(
    "info",
    [
        {"control_address": ""},
        {"timeout_s": -1},
        {"timeout_s": "30"},
        {"timeout_s": None},
        {"attempts": 0},
        {"attempts": "3"},
        {"attempts": 1.5},
        {"rank_offset": -1},
        {"rank_offset": "0"},
        {"errors": "ignore"},
        {"receiver_settings": {"color": 1}},
        {"receiver_settings": {"stall_timeout_s": "1"}},
    ],
)
def test_wrong_init_infos_are_refused(info):
    with pytest.raises(ValueError, match="init_info"):
        MxInitInfo(**{"control_address": "127.0.0.1:9", **info})
