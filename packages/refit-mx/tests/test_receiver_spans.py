"""Spans of a receive: phases, bytes and rate, and errors only by class."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from refit_fixtures import exported, verbose, zeros
from refit_processes import targets_of, weights

from refit_mx import VersionNotFoundError, compile_pass

MOVING = {"refit.transfer", "refit.verify", "refit.install"}


def test_spans_report_phases_bytes_and_error_classes(world, published):
    with exported() as spans:
        world.receiver().refit("v1", zeros())
        with pytest.raises(VersionNotFoundError):
            world.receiver().refit("secret-name", zeros())
        exported_spans = [span for span in spans() if span.name != "refit.publish"]
    (receive,) = [
        span
        for span in exported_spans
        if span.name == "refit.receive" and span.attributes["refit.version"] == "v1"
    ]
    assert receive.attributes["refit.bytes"] == sum(each.nbytes for each in published[1].values())
    assert receive.attributes["refit.sources"] == 2
    assert receive.attributes["refit.transport"] == "tcp"
    assert receive.attributes["refit.gb_per_s"] > 0
    children = [
        span.name
        for span in sorted(exported_spans, key=lambda span: span.start_time)
        if span.parent and span.parent.span_id == receive.context.span_id
    ]
    moved = [
        span
        for span in exported_spans
        if span.name in MOVING and span.attributes["refit.version"] == "v1"
    ]
    assert {span.name for span in moved} == MOVING
    for span in moved:
        assert span.attributes["refit.bytes"] == receive.attributes["refit.bytes"]
        assert span.attributes["refit.gb_per_s"] > 0
    assert children == [f"refit.{name}" for name in ("plan", "transfer", "verify", "install")]
    failed = [span for span in exported_spans if span.attributes.get("error.type")]
    assert {span.attributes["error.type"] for span in failed} == {"VersionNotFoundError"}
    # A phase without a span on success has one on failure.
    assert {span.name for span in failed} == {"refit.receive", "refit.lease"}
    assert all(not span.events and not span.status.description for span in failed)


def test_verbose_refit_has_a_span_of_every_phase(world, published):
    with exported() as spans, verbose():
        world.receiver().refit("v1", zeros())
        exported_spans = sorted(spans(), key=lambda span: span.start_time)
    assert [span.name for span in exported_spans] == [
        f"refit.{name}"
        for name in ("receive", "lease", "discover", "plan", "transfer", "verify", "install")
    ]


def test_compile_span_has_the_bytes_of_the_outputs(world):
    shapes = {"layers.0.mlp.weight": ("float32", (256, 128)), "norm": ("float32", (256,))}
    world.publish_state("v1", weights(3, shapes))
    compiler = compile_pass("deep_gemm_fp8")
    output_bytes: list[int] = []

    def install(tensors: Mapping[str, torch.Tensor]) -> None:
        output_bytes.append(sum(tensor.nbytes for tensor in tensors.values()))

    with exported() as spans:
        world.receiver(targets_of(shapes)).refit("v1", install, compiler)
        attributes = {span.name: span.attributes for span in spans()}
    for name in ("refit.compile", "refit.install"):
        assert (
            attributes[name]["refit.bytes"]
            == output_bytes[0]
            < attributes["refit.transfer"]["refit.bytes"]
        )
        assert attributes[name]["refit.gb_per_s"] > 0
