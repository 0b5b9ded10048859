"""Tests of verl's installed wheel, with the plugin loaded.

They are all that verl names `_on_cpu`, but `LEFT_OUT`, whose tests start Ray with 100 processors.
None of them uses TransferQueue: they show that the plugin changes nothing else in verl.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

LEFT_OUT = "single_controller"
TESTS = 307
PLUGIN = """
from verl import DataProto  # loads the plugins
from transfer_queue.storage.managers.base import StorageManagerFactory

def pytest_report_header():
    return "backends: " + " ".join(StorageManagerFactory._registry)
"""


@pytest.mark.timeout(300)  # about 35 s of processor time
def test_tests_of_verl_pass_with_the_plugin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    distribution = importlib.metadata.distribution("verl")
    folder = Path(str(distribution.locate_file("tests")))
    modules = sorted(  # not those of other wheels in the same folder
        str(file.locate())
        for file in distribution.files or ()
        if file.parts[0] == "tests" and file.name.endswith("_on_cpu.py")
        if LEFT_OUT not in file.parts
    )
    (tmp_path / "verl").symlink_to(folder.parent / "verl")  # a test reads a file of it
    report = tmp_path / "report.xml"
    (tmp_path / "loaded_plugin.py").write_text(PLUGIN)
    run = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", *modules),
            *("-p", "loaded_plugin", "-p", "no:cacheprovider", "--import-mode=importlib"),
            *("-c", os.devnull, "--rootdir", str(folder), "--confcutdir", str(folder)),
            *(f"--junitxml={report}", "--timeout=180"),
        ],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": str(tmp_path),
            "PYTHONDONTWRITEBYTECODE": "1",  # not into the installed wheel
        },
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert "PackedStorage" in run.stdout, run.stdout + run.stderr
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    passed = sum(len(case) == 0 for case in cases)
    with capsys.disabled():
        sys.stdout.write(
            f"\nverl {distribution.version}: {passed} of {len(cases)} tests of its wheel pass\n"
        )
    assert run.returncode == 0, run.stdout
    assert (len(cases), passed) == (TESTS, TESTS)
