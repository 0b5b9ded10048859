"""Tests of verl's installed wheel, with the plugin loaded.

They are the modules that the plugin or the pair of tensordict and torch could break: the protocol,
which packs samples into TensorDicts, the output of agent loops, and advantages of trajectories.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

MODULES = (
    "test_protocol_v2_on_cpu.py",
    "test_protocol_on_cpu.py",
    "experimental/agent_loop/test_agent_loop_extra_fields_schema_on_cpu.py",
    "trainer/test_multi_trajectories_advantage_on_cpu.py",
)
TESTS = 85
PLUGIN = """
from verl import DataProto  # loads the plugins
from transfer_queue.storage.managers.base import StorageManagerFactory

def pytest_report_header():
    return "backends: " + " ".join(StorageManagerFactory._registry)
"""


@pytest.mark.timeout(300)  # imports of verl; 15 s of processor time
def test_tests_of_verl_pass_with_the_plugin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    distribution = importlib.metadata.distribution("verl")
    folder = Path(str(distribution.locate_file("tests")))
    report = tmp_path / "report.xml"
    (tmp_path / "loaded_plugin.py").write_text(PLUGIN)
    run = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", *(str(folder / module) for module in MODULES)),
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
