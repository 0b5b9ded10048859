"""`make test` names missing Debian packages, installs them as root, and lists skipped tests."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from integration.changed import changed_files, members_of
from integration.git_commands import git
from integration.system_packages import packages_of
from integration.waiting import wait_until

ROOT = Path(__file__).parent.parent
CHECK = ROOT / "integration" / "system_packages.py"
WITH_POLICY = """
import sys
from pathlib import Path
from integration import system_packages
system_packages.POLICY = Path(sys.argv.pop())
sys.exit(system_packages.main())
"""
"""Program that installs packages with its policy in another file, since containers have one."""
HIDDEN = ["chromium", "jq", "openssl"]
"""Programs found only on PATH, not in the folders that are always searched."""


def run(*command: str | Path, path: Path) -> subprocess.CompletedProcess[str]:
    """Run a command whose PATH is one folder, without the variables of an outer make."""
    inherited = ("MAKE", "PYTHON")  # `make PYTHON=python3.12` exports it
    outer = {name: text for name, text in os.environ.items() if not name.startswith(inherited)}
    return subprocess.run(
        [*map(str, command)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**outer, "PATH": str(path)},
        timeout=240,
        check=False,
    )


def link(folder: Path, *programs: str) -> None:
    for program in programs:
        location = shutil.which(program)
        assert location, program
        (folder / program).symlink_to(location)


def write(path: Path, script: str) -> None:
    path.write_text(f"#!{shutil.which('sh')}\n{script}\n")
    path.chmod(0o755)


def test_one_line_installs_the_missing_packages(tmp_path: Path) -> None:
    done = run(sys.executable, CHECK, path=tmp_path)
    [line] = [line for line in done.stdout.splitlines() if line.startswith("    ")]
    update, _, install = line.strip().partition(" && ")
    assert (done.returncode, update) == (0, "sudo apt-get update")
    command, _, packages = install.partition(" --no-install-recommends ")
    assert command == "sudo apt-get install --yes"
    assert set(packages_of(HIDDEN)) <= set(packages.split())
    assert "left out" in done.stdout
    assert run(sys.executable, CHECK, "--check", path=tmp_path).returncode == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: only root installs packages")
@pytest.mark.parametrize("failing", [None, "update", "install"])
def test_root_installs_missing_packages(tmp_path: Path, failing: str | None) -> None:
    calls = tmp_path / "calls"
    write(tmp_path / "apt-get", f'echo "$@" >>{calls}; [ "$1" != "{failing}" ]')
    done = run(sys.executable, CHECK, path=tmp_path)
    called = [line.split() for line in calls.read_text().splitlines()]
    assert called[0][0] == "update"
    assert failing == "update" or set(packages_of(HIDDEN)) <= set(called[1])
    assert done.returncode == (failing is not None)
    assert ("failed with status 1" in done.stderr) == (failing is not None)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: only root installs packages")
def test_interrupted_installation_forbids_no_services(tmp_path: Path) -> None:
    link(tmp_path, "sleep")
    begun, policy = tmp_path / "begun", tmp_path / "policy-rc.d"
    write(tmp_path / "apt-get", f'[ "$1" = update ] || {{ : >{begun}; exec sleep 60; }}')
    environment = {**os.environ, "PATH": str(tmp_path)}
    running = subprocess.Popen(
        [sys.executable, "-c", WITH_POLICY, policy],
        cwd=ROOT,
        env=environment,
        start_new_session=True,
        # A shell that runs the tests in the background makes them ignore SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    wait_until(begun.exists)
    assert policy.exists()
    os.killpg(running.pid, signal.SIGINT)
    assert running.wait(60)
    assert not policy.exists()


def test_skipped_tests_are_listed_by_name_and_number(tmp_path: Path) -> None:
    link(tmp_path, "git")
    files = ["services/admin/tests/pages/test_pages_browser.py", "integration/test_imports.py"]
    done = run(sys.executable, "-m", "pytest", "--list-left-out", *files, path=tmp_path)
    assert done.returncode == 0, done.stdout
    listed = [line for line in done.stdout.splitlines() if line.startswith("left out without ")]
    assert [line.split(": ")[0] for line in listed] == ["left out without chromium"]
    number, _, path = listed[0].split(": ")[1].partition(" of ")
    assert (int(number) > 0, path) == (True, files[0])
    names = [name.partition(" ")[0] for name in listed[0].split(": ")[2].split(", ")]
    source = (ROOT / files[0]).read_text()
    assert all(f"def {name}(" in source for name in names)
    assert len(names) <= int(number)


def test_tests_ignore_ray_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.9.9.9:6379")
    program = "import os, conftest; print(os.environ.get('RAY_ADDRESS'))"
    done = run(sys.executable, "-c", program, path=ROOT)
    assert done.stdout.split() == ["None"]


@pytest.mark.parametrize("installed", ["python3.12", "python3.13", "python3.14"])
def test_make_uses_a_later_python_if_3_11_fails(tmp_path: Path, installed: str) -> None:
    link(tmp_path, "make", "bash", "grep")
    write(tmp_path / "python3.11", "exit 127")  # a version manager's shim without that version
    (tmp_path / installed).symlink_to(sys.executable)
    done = run("make", "--eval", "shown: ; @echo $(PYTHON)", "shown", path=tmp_path)
    assert done.stdout.split() == [installed]


def test_make_demo_installs_only_what_it_needs(tmp_path: Path) -> None:
    link(tmp_path, "make", "bash", "grep")
    shown = run("make", "--dry-run", f"PYTHON={sys.executable}", "sync-demo", path=tmp_path).stdout
    [selection] = re.findall(r"uv sync (--python [^;]*);", shown)
    export = ["export", "--frozen", "--quiet", "--no-hashes", "--no-annotate", "--no-header"]
    options = selection.replace("--inexact", "").split()
    done = run(ROOT / ".tools/bin/uv", *export, *options, path=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [line.removeprefix("-e ") for line in done.stdout.splitlines()]
    names = {re.split("[=@ ;]", line)[0] for line in lines}
    assert {"./services/trainer", "./services/admin", "ray", "torch"} <= names
    development = {"pytest", "hypothesis", "mypy", "ruff", "mkdocs", "towncrier", "playwright"}
    stores = {name for name in names if "mooncake" in name or "yuanrong" in name}
    assert names & development | stores == set()


def test_changed_files_differ_from_main_committed_or_not(tmp_path: Path) -> None:
    for name in ("packages/a/x.py", "packages/b/x.py", "services/c/x.py", "docs/x.md"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("")
    git(tmp_path, "init", "--initial-branch=main")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "one")
    assert changed_files(tmp_path) == []
    git(tmp_path, "switch", "-c", "branch")
    (tmp_path / "packages/a/x.py").write_text("1")
    git(tmp_path, "commit", "-a", "-m", "two")
    (tmp_path / "docs/x.md").write_text("1")
    (tmp_path / "services/c/new.py").write_text("")
    files = changed_files(tmp_path)
    assert files == ["docs/x.md", "packages/a/x.py", "services/c/new.py"]
    assert members_of(files) == ["packages/a", "services/c"]
