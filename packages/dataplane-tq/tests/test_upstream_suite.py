"""TransferQueue's own tests, from its installed wheel, with the packed backend registered.

Those whose backend can be configured run on packed: `upstream_suite/packed_backend.py` configures
it. The others test what packed replaces in their process, or shares with them. Tests that do not
pass are listed here with the reason.
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

LEFT_OUT = {
    "test_controller.py": "starts Ray for each of its 28 tests",
    "test_simple_storage_unit.py": "keeps a Ray with the machine's CPUs until the session ends",
    "test_ssd_offload_e2e.py": "configures SimpleStorage",
}
TESTS = 625
ON_PACKED = ("test_checkpoint_e2e", "test_e2e_lifecycle_consistency", "test_kv_interface_e2e")
"""Modules whose queue is configured to store on packed."""
EXCEPTIONS = {
    **dict.fromkeys(
        (
            "test_close_resets_state",
            "test_lazy_init_idempotent",
            "test_pack_contiguous_required",
            "test_pack_unpack_roundtrip_multiple",
            "test_pack_unpack_roundtrip_single",
        ),
        "skipped: needs CUDA",
    ),
    **dict.fromkeys(
        ("test_client_create_empty_tensorlist", "test_mixed_flow", "test_npu_only_flow"),
        "skipped: needs an NPU",
    ),
    "test_create_client": "skipped: needs Yuanrong's former package datasystem",
    "test_mset_mget_p2p": "needs pytest-mock",
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


@pytest.mark.timeout(500)  # three starts of Ray, half a minute each; the rest takes one
def test_tests_of_transfer_queue_pass_with_packed(tmp_path, capsys):
    distribution = importlib.metadata.distribution("TransferQueue")
    folder = Path(str(distribution.locate_file("tests")))
    modules = sorted(path for path in folder.rglob("test_*.py") if path.name not in LEFT_OUT)
    report, here = tmp_path / "report.xml", Path(__file__).parent
    run = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", *map(str, modules)),
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
        timeout=480,
        check=False,
    )
    assert report.exists(), run.stdout + run.stderr
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    outcomes = [(case.get("name", ""), outcome(case)) for case in cases]
    others = {name: result for name, result in outcomes if result != "passed"}
    passed = len(outcomes) - len(others)
    stored = [
        case for case in cases if any(each in case.get("classname", "") for each in ON_PACKED)
    ]
    stored_and_passed = sum(outcome(case) == "passed" for case in stored)
    with capsys.disabled():
        sys.stdout.write(
            f"\nTransferQueue {distribution.version}: {passed} of {len(outcomes)} of its tests "
            f"pass with packed, among them {stored_and_passed} of {len(stored)} that store on it\n"
        )
    assert others.keys() == EXCEPTIONS.keys(), "\n".join(
        f"{name}: {result}" for name, result in others.items() if name not in EXCEPTIONS
    )
    assert (len(outcomes), passed) == (TESTS, TESTS - len(EXCEPTIONS))
