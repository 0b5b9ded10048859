"""Imports are cheap, and errors have the classes of the contract."""

import inspect
import pickle
import subprocess
import sys

import pytest

import dataplane_core
from dataplane_core import DataPlaneError, MissingDataError, errors


def test_importing_the_package_imports_neither_torch_nor_ray():
    code = "import sys, dataplane_core; print({'torch', 'ray', 'tensordict'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


NEED_TENSORS = [
    "from dataplane_core import InMemoryDataPlaneClient",
    "from dataplane_core import StreamingDataLoader",
    "from dataplane_core import save_partition",
    "import dataplane_core.key_value",
    "import dataplane_core.testing",
    "dataplane_core.build_data_plane_client({'enabled': True, 'impl': 'in_memory'})",
]


def test_missing_tensors_extra_is_named():
    program = """
import sys
sys.modules["torch"] = None  # as if not installed
import dataplane_core
for line in sys.argv[1:]:
    try:
        exec(line)
    except ImportError as error:
        print(error)
"""
    command = [sys.executable, "-c", program, *NEED_TENSORS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    messages = done.stdout.splitlines()
    assert len(messages) == len(NEED_TENSORS)
    assert all("'torch'" in each and "dataplane-core[tensors]" in each for each in messages)


def test_every_public_name_exists_and_is_listed_in_order():
    assert all(hasattr(dataplane_core, name) for name in dataplane_core.__all__)
    constants = [name for name in dataplane_core.__all__ if name.isupper()]
    others = [name for name in dataplane_core.__all__ if not name.isupper()]
    assert dataplane_core.__all__ == sorted(constants) + sorted(others)
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = dataplane_core.nothing_like_it


ALL_ERRORS = [
    value
    for _, value in inspect.getmembers(errors, inspect.isclass)
    if value.__module__ == errors.__name__ and value is not DataPlaneError
]


@pytest.mark.parametrize("error", ALL_ERRORS)
def test_every_error_derives_from_the_root_and_a_built_in(error):
    assert issubclass(error, DataPlaneError)
    builtins = (KeyError, ValueError, TimeoutError, RuntimeError, NotImplementedError)
    assert issubclass(error, builtins)


@pytest.mark.parametrize("error", ALL_ERRORS)
def test_every_error_crosses_process_boundaries_with_its_message(error):
    copied = pickle.loads(pickle.dumps(error("what went wrong")))
    assert type(copied) is error
    assert str(copied) == "what went wrong"


def test_attributes_of_an_error_cross_process_boundaries():
    copied = pickle.loads(pickle.dumps(MissingDataError("m", sample_ids=["a"], fields=["x"])))
    assert (copied.sample_ids, copied.fields) == (["a"], ["x"])


def test_hostile_ids_are_shown_escaped():
    assert errors.listed(["\x1b[31mred\n"]) == r"'\x1b[31mred\n'"
