"""Compile passes by name: the built-in ones, registered ones, and those of installed packages."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch

from refit_mx.compile.base import compile_pass, compile_pass_names, register_compile_pass
from refit_mx.compile.hf_raw import HfRaw
from refit_mx.errors import RefitConfigError
from refit_mx.tensor_types import TensorSpec


class Halved(HfRaw):
    """A third party's pass, which is easily told from the others."""

    name = "halved_by_a_test"

    def unchanged(self, specs):
        return frozenset()

    def run(self, tensors, out):
        for name, made in out.items():
            torch.mul(tensors[name], 0.5, out=made)


def test_the_built_in_passes_are_made_by_name():
    for name in ("hf_raw", "deep_gemm_fp8", "cutlass_fp8"):
        assert compile_pass(name).name == name
        assert name in compile_pass_names()


def test_an_unknown_name_says_which_are_known():
    with pytest.raises(RefitConfigError, match=r"cutlass_fp8, deep_gemm_fp8, .*hf_raw"):
        compile_pass("marlin")


def test_a_registered_pass_is_found_and_its_name_is_taken():
    register_compile_pass("halved_by_a_test", Halved)
    made = compile_pass("halved_by_a_test")
    out = {"a": torch.empty(2)}
    made.check([TensorSpec("a", "float32", (2,))])
    made.run({"a": torch.tensor([1.0, 2.0])}, out)
    assert out["a"].tolist() == [0.5, 1.0]
    with pytest.raises(RefitConfigError, match="there is a pass of this name"):
        register_compile_pass("halved_by_a_test", Halved)


@pytest.mark.parametrize("name", ["hf_raw", ""])
def test_a_name_that_is_taken_or_empty_is_refused(name):
    with pytest.raises(RefitConfigError, match="register_compile_pass"):
        register_compile_pass(name, Halved)


def test_a_factory_that_makes_another_target_is_refused():
    register_compile_pass("not_what_it_says", Halved)
    with pytest.raises(RefitConfigError, match="makes 'halved_by_a_test'"):
        compile_pass("not_what_it_says")


def install(folder, package, target, value="{package}:Pass"):
    """A package as pip leaves it: a module and its metadata."""
    value = value.format(package=package)
    (folder / f"{package}.py").write_text(
        textwrap.dedent(f"""
            from refit_mx.compile.hf_raw import HfRaw

            class Pass(HfRaw):
                name = {target!r}
        """)
    )
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[refit_mx.compile_passes]\n{target} = {value}\n")


def said_by(folder, code):
    """What a fresh process with the packages of the folder prints."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(folder)!r})\n{code}"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.stdout + done.stderr


MAKE = "from refit_mx.compile.base import compile_pass; print('made', compile_pass({!r}).name)"


def test_an_installed_package_brings_a_pass(tmp_path):
    install(tmp_path, "marlin_for_refit", "marlin")
    assert "made marlin" in said_by(tmp_path, MAKE.format("marlin"))


def test_two_packages_that_claim_one_name_are_refused(tmp_path):
    install(tmp_path, "one_package", "marlin")
    install(tmp_path, "other_package", "marlin")
    said = said_by(tmp_path, MAKE.format("marlin"))
    assert "RefitConfigError" in said
    assert "one_package:Pass" in said
    assert "other_package:Pass" in said


def test_a_package_cannot_take_the_name_of_a_built_in_pass(tmp_path):
    install(tmp_path, "usurper", "hf_raw")
    said = said_by(tmp_path, MAKE.format("hf_raw"))
    assert "RefitConfigError" in said
    assert "usurper:Pass" in said
