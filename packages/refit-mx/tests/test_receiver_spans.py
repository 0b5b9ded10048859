"""What a receive tells of itself: phases, bytes and speed, and errors by class alone."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from refit_fixtures import exported, verbose, zeros
from refit_processes import targets_of, weights

from refit_mx.compile.base import compile_pass
from refit_mx.errors import VersionNotFoundError

MOVING = {"refit.transfer", "refit.verify", "refit.install"}


def test_spans_tell_the_phases_the_bytes_and_errors_by_class_only(world, published):
    with exported() as spans:
        world.receiver().refit("v1", zeros())
        with pytest.raises(VersionNotFoundError):
            world.receiver().refit("secret-name", zeros())
        found = [span for span in spans() if span.name != "refit.publish"]
    (whole,) = [
        span
        for span in found
        if span.name == "refit.receive" and span.attributes["refit.version"] == "v1"
    ]
    assert whole.attributes["refit.bytes"] == sum(each.nbytes for each in published[1].values())
    assert whole.attributes["refit.sources"] == 2
    assert whole.attributes["refit.transport"] == "tcp"
    assert whole.attributes["refit.gb_per_s"] > 0
    children = [
        span.name
        for span in sorted(found, key=lambda span: span.start_time)
        if span.parent and span.parent.span_id == whole.context.span_id
    ]
    moved = [
        span for span in found if span.name in MOVING and span.attributes["refit.version"] == "v1"
    ]
    assert {span.name for span in moved} == MOVING
    for span in moved:
        assert span.attributes["refit.bytes"] == whole.attributes["refit.bytes"]
        assert span.attributes["refit.gb_per_s"] > 0
    assert children == [f"refit.{name}" for name in ("plan", "transfer", "verify", "install")]
    failed = [span for span in found if span.attributes.get("error.type")]
    assert {span.attributes["error.type"] for span in failed} == {"VersionNotFoundError"}
    # A phase that is not told when it goes well is told when it fails.
    assert {span.name for span in failed} == {"refit.receive", "refit.lease"}
    assert all(not span.events and not span.status.description for span in failed)


def test_a_verbose_refit_tells_every_phase(world, published):
    with exported() as spans, verbose():
        world.receiver().refit("v1", zeros())
        found = sorted(spans(), key=lambda span: span.start_time)
    assert [span.name for span in found] == [
        f"refit.{name}"
        for name in ("receive", "lease", "discover", "plan", "transfer", "verify", "install")
    ]


def test_a_compile_pass_tells_what_it_made(world):
    shapes = {"layers.0.mlp.weight": ("float32", (256, 128)), "norm": ("float32", (256,))}
    publisher = world.publisher()
    world.version("v1")
    publisher.publish("v1", weights(3, shapes))
    compiler = compile_pass("deep_gemm_fp8")
    made: list[int] = []

    def install(tensors: Mapping[str, torch.Tensor]) -> None:
        made.append(sum(tensor.nbytes for tensor in tensors.values()))

    with exported() as spans:
        world.receiver(targets_of(shapes)).refit("v1", install, compiler)
        told = {span.name: span.attributes for span in spans()}
    for name in ("refit.compile", "refit.install"):
        assert told[name]["refit.bytes"] == made[0] < told["refit.transfer"]["refit.bytes"]
        assert told[name]["refit.gb_per_s"] > 0
