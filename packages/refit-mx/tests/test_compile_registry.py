"""Compile passes by name: the built-in ones, registered ones, and those of installed packages."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch

from refit_mx import RefitConfigError, TensorSpec, compile_pass, register_compile_pass

HfRaw = type(compile_pass("hf_raw"))


class Halved(HfRaw):
    """A third party's pass with a recognizable result."""

    name = "halved_by_a_test"

    def unchanged(self, specs):
        return frozenset()

    def run(self, tensors, out):
        for name, output in out.items():
            torch.mul(tensors[name], 0.5, out=output)


def test_built_in_passes_are_made_by_name():
    for name in ("hf_raw", "deep_gemm_fp8", "cutlass_fp8"):
        assert compile_pass(name).name == name


def test_unknown_name_error_lists_the_known_ones():
    with pytest.raises(RefitConfigError, match=r"cutlass_fp8, deep_gemm_fp8, .*hf_raw"):
        compile_pass("marlin")


def test_registered_pass_is_usable_and_its_name_is_taken():
    register_compile_pass("halved_by_a_test", Halved)
    halved = compile_pass("halved_by_a_test")
    out = {"a": torch.empty(2)}
    halved.check([TensorSpec("a", "float32", (2,))])
    halved.run({"a": torch.tensor([1.0, 2.0])}, out)
    assert out["a"].tolist() == [0.5, 1.0]
    with pytest.raises(RefitConfigError, match="this name is taken"):
        register_compile_pass("halved_by_a_test", Halved)


@pytest.mark.parametrize("name", ["hf_raw", ""])
def test_taken_or_empty_name_is_refused(name):
    with pytest.raises(RefitConfigError, match="register_compile_pass"):
        register_compile_pass(name, Halved)


def test_factory_for_another_target_is_refused():
    register_compile_pass("not_what_it_says", Halved)
    with pytest.raises(RefitConfigError, match="created 'halved_by_a_test'"):
        compile_pass("not_what_it_says")


def install(folder, package, target, value="{package}:Pass"):
    """Write a package like an installed one: a module and its metadata."""
    value = value.format(package=package)
    (folder / f"{package}.py").write_text(
        textwrap.dedent(f"""
            from refit_mx import compile_pass

            class Pass(type(compile_pass("hf_raw"))):
                name = {target!r}
        """)
    )
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[refit_mx.compile_passes]\n{target} = {value}\n")


def output_of(folder, code):
    """Return the output of a new process that has the packages of the folder."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(folder)!r})\n{code}"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.stdout + done.stderr


MAKE = "from refit_mx import compile_pass; print('made', compile_pass({!r}).name)"


def test_installed_package_provides_a_pass(tmp_path):
    install(tmp_path, "marlin_for_refit", "marlin")
    assert "made marlin" in output_of(tmp_path, MAKE.format("marlin"))


def test_two_packages_with_the_same_pass_name_are_refused(tmp_path):
    install(tmp_path, "one_package", "marlin")
    install(tmp_path, "other_package", "marlin")
    output = output_of(tmp_path, MAKE.format("marlin"))
    assert "RefitConfigError" in output
    assert "one_package:Pass" in output
    assert "other_package:Pass" in output


def test_package_cannot_take_the_name_of_a_built_in_pass(tmp_path):
    install(tmp_path, "usurper", "hf_raw")
    output = output_of(tmp_path, MAKE.format("hf_raw"))
    assert "RefitConfigError" in output
    assert "usurper:Pass" in output
