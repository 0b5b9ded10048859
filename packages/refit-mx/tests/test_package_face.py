"""The package needs nothing beside the standard library, and shows what it has."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

import refit_mx


def test_importing_the_package_imports_no_third_party_module():
    code = (
        "import sys; before = set(sys.modules); import refit_mx; "
        "roots = {name.partition('.')[0] for name in set(sys.modules) - before}; "
        "print(sorted(roots - sys.stdlib_module_names))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['refit_mx']"


@pytest.mark.parametrize("name", refit_mx.__all__)
def test_a_public_name_exists(name):
    if name == "MxWeightTransferEngine" and find_spec("vllm") is None:
        pytest.skip("needs the package vllm, whose wheels need a CUDA GPU")
    assert getattr(refit_mx, name).__name__ == name
