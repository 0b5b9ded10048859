"""TransferQueue's own storage tests, from its installed wheel, run on the packed backend.

They are the modules whose backend can be configured; `upstream_suite/packed_backend.py` configures
the packed one. Tests that do not pass are listed here with the reason.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from integration.lean_ray import LEAN_ENVIRONMENT

pytestmark = pytest.mark.slow

MODULES = (
    "test_e2e_lifecycle_consistency.py",
    "test_kv_interface_e2e.py",
    "test_checkpoint_e2e.py",
)
TESTS = 80
EXCEPTIONS = {
    "test_gdr_gpu_tensor_roundtrip": "skipped: only for Mooncake with GPUDirect RDMA",
    "test_gdr_cpu_tensor_roundtrip": "skipped: only for Mooncake with GPUDirect RDMA",
    "test_tensor_fields": "asks for the folder simple_storage in the checkpoint",
    "test_storage_saved_is_true": "SimpleStorage ignores include_storage=False; packed obeys it",
    "test_load_raises_on_storage_unit_count_mismatch": "edits a file in the folder simple_storage; "
    "packed also restores to another number of units",
}


def outcome(case):
    for kind in ("failure", "error", "skipped"):
        element = case.find(kind)
        if element is not None:
            return f"{kind}: {element.get('message')}"
    return "passed"


@pytest.mark.timeout(400)  # three starts of Ray; half a minute each on an idle machine
def test_storage_tests_of_transfer_queue_pass_on_packed(tmp_path, capsys):
    distribution = importlib.metadata.distribution("TransferQueue")
    folder = Path(str(distribution.locate_file("tests/e2e")))
    report, here = tmp_path / "report.xml", Path(__file__).parent
    run = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", *(str(folder / module) for module in MODULES)),
            *("-p", "packed_backend", "-p", "no:cacheprovider", "--import-mode=importlib"),
            *("-c", os.devnull, "--rootdir", str(folder), "--confcutdir", str(folder)),
            *(f"--junitxml={report}", "--timeout=180"),
        ],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                [str(here / "upstream_suite"), str(here), LEAN_ENVIRONMENT["PYTHONPATH"]]
            ),
            "PYTHONDONTWRITEBYTECODE": "1",  # not into the installed wheel
            "TQ_TEST_BACKEND": "PackedStorage",
        },
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert report.exists(), run.stdout + run.stderr
    outcomes = [
        (case.get("name", ""), outcome(case))
        for case in ElementTree.parse(report).getroot().iter("testcase")
    ]
    others = {name: result for name, result in outcomes if result != "passed"}
    passed = len(outcomes) - len(others)
    with capsys.disabled():
        sys.stdout.write(
            f"\nTransferQueue {distribution.version}: {passed} of {len(outcomes)} of its storage "
            "tests pass on packed\n"
        )
    assert others.keys() == EXCEPTIONS.keys(), "\n".join(
        f"{name}: {result}" for name, result in others.items() if name not in EXCEPTIONS
    )
    assert (len(outcomes), passed) == (TESTS, TESTS - len(EXCEPTIONS))
