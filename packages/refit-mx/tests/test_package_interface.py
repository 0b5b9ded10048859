"""The package imports no dependency eagerly, its public names exist, and its errors pickle."""

import pickle
import subprocess
import sys

import pytest

import refit_mx
from refit_mx import DigestMismatchError, FleetError, RefitTimeoutError, SourceLostError


def test_importing_the_package_imports_no_third_party_module():
    code = (
        "import sys; before = set(sys.modules); import refit_mx; "
        "roots = {name.partition('.')[0] for name in set(sys.modules) - before}; "
        "print(sorted(roots - sys.stdlib_module_names))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['refit_mx']"


@pytest.mark.parametrize("name", refit_mx.__all__)
def test_public_name_exists(name):
    assert getattr(refit_mx, name).__name__ == name


WITHOUT = """
import sys
from importlib.abc import MetaPathFinder

class Missing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name in {missing!r} else real(name)
sys.meta_path.insert(0, Missing())
from refit_mx import *
import refit_mx
from refit_mx.control import *
MxV2RefitReceiver, MxV2TrainingPublisher, ControlClient
for name in ("MxWeightTransferEngine", "FleetStats", "RefitFleet"):
    assert name not in refit_mx.__all__
    try:
        getattr(refit_mx, name)
    except ImportError as error:
        print(error)
"""


def test_star_import_needs_no_extra():
    code = WITHOUT.format(missing=("vllm", "httpx", "nixl", "nixl_cu12", "nixl_cu13"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "refit_mx.MxWeightTransferEngine needs the package vllm; install vllm",
        "refit_mx.FleetStats needs the package httpx; install refit-mx[fleet]",
        "refit_mx.RefitFleet needs the package httpx; install refit-mx[fleet]",
    ]


@pytest.mark.parametrize(
    "error",
    [
        FleetError("one of two failed", {"http://127.0.0.1:1": "no answer"}),
        SourceLostError("lost", ("trainer-0",)),
        DigestMismatchError("wrong bytes", ("trainer-0",)),
        RefitTimeoutError("not done after 1 s"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_error_is_the_same_after_pickling(error):
    sent = pickle.loads(pickle.dumps(error))
    assert type(sent) is type(error)
    assert (sent.args, vars(sent)) == (error.args, vars(error))
