"""TransferQueue's optional libraries stay out of a process that does not use them."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

pytestmark = [
    pytest.mark.skipif(find_spec("yr") is None, reason="needs the package openyuanrong-datasystem"),
    pytest.mark.slow,  # so that they run where the package is
]


def printed(code):
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout.strip().splitlines()[-1]


def test_transfer_queue_itself_loads_yuanrongs_libraries_wherever_they_are_installed():
    code = "import sys, transfer_queue; print('yr.datasystem' in sys.modules)"
    assert printed(code) == "True"


def test_a_client_of_another_backend_loads_none_of_yuanrongs_libraries():
    code = "import sys, dataplane_tq.client; print([m for m in sys.modules if m[:2] == 'yr'])"
    assert printed(code) == "[]"


def test_yuanrong_is_loaded_when_it_is_first_used():
    code = (
        "import sys; from dataplane_tq.upstream import yuanrong_client; "
        "print(yuanrong_client.datasystem.KVClient.__name__, 'yr.datasystem' in sys.modules)"
    )
    assert printed(code) == "KVClient True"


def test_yuanrong_is_refused_where_nixl_is_loaded_instead_of_ending_the_process():
    code = (
        "import sys, types; sys.modules['nixl_cu12._bindings'] = types.ModuleType('x')\n"
        "from dataplane_tq.upstream import yuanrong_client\n"
        "try: yuanrong_client.datasystem.KVClient\n"
        "except ImportError as error: print('holds nixl_cu12._bindings' in str(error))"
    )
    assert printed(code) == "True"
