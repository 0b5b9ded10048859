"""Imports of TransferQueue's optional libraries: only in processes that use them."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

pytestmark = [
    pytest.mark.skipif(find_spec("yr") is None, reason="needs the package openyuanrong-datasystem"),
    pytest.mark.slow,  # the job of slow tests has the package
]


def printed(code):
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.long
def test_transfer_queue_loads_yuanrong_if_installed():
    code = "import sys, transfer_queue; print('yr.datasystem' in sys.modules)"
    assert printed(code) == "True"


def test_client_of_another_backend_does_not_load_yuanrong():
    code = "import sys, dataplane_tq.client; print([m for m in sys.modules if m[:2] == 'yr'])"
    assert printed(code) == "[]"


def test_yuanrong_is_loaded_on_first_use():
    code = (
        "import sys; from dataplane_tq.upstream import yuanrong_client; "
        "print(yuanrong_client.datasystem.KVClient.func.__name__, 'yr.datasystem' in sys.modules)"
    )
    assert printed(code) == "KVClient True"


def test_yuanrong_is_refused_if_nixl_is_loaded():
    code = (
        "import sys, types; sys.modules['nixl_cu12._bindings'] = types.ModuleType('x')\n"
        "from dataplane_tq.upstream import yuanrong_client\n"
        "try: yuanrong_client.datasystem.KVClient\n"
        "except ImportError as error: print('loaded nixl_cu12._bindings' in str(error))"
    )
    assert printed(code) == "True"
