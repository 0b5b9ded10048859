"""The workflows release only commits of main whose tests passed, and images that were tried."""

from __future__ import annotations

import json
import os
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from integration.git_commands import git

ROOT = Path(__file__).parents[1]
WORKFLOWS = ROOT / ".github" / "workflows"
TESTED = ROOT / ".github" / "actions" / "tested" / "tested"


def jobs(name: str) -> dict[str, Any]:
    declared: dict[str, Any] = yaml.safe_load((WORKFLOWS / name).read_text())["jobs"]
    return declared


def needed(jobs: dict[str, Any], name: str) -> set[str]:
    """Return the jobs that must succeed before the job ``name`` starts."""
    direct = jobs[name].get("needs", [])
    direct = [direct] if isinstance(direct, str) else direct
    return {*direct, *(indirect for job in direct for indirect in needed(jobs, job))}


@pytest.mark.parametrize(
    ("workflow", "job"),
    [("release.yml", "publish"), ("release.yml", "notes"), ("images.yml", "push")],
)
def test_release_job_needs_the_tests(workflow: str, job: str) -> None:
    declared = jobs(workflow)
    assert "tested" in needed(declared, job)
    assert declared["tested"]["permissions"] == {"actions": "read", "contents": "read"}
    *_, checkout, tested = declared["tested"]["steps"]
    assert checkout["with"]["fetch-depth"] == 0
    assert tested == {"uses": "./.github/actions/tested"}
    action = yaml.safe_load((TESTED.parent / "action.yml").read_text())
    assert action["runs"]["steps"][0]["run"] == f"{TESTED.relative_to(ROOT)} HEAD"


def test_every_job_that_may_write_needs_the_tests() -> None:
    scopes = {"packages", "id-token", "contents"}
    for workflow in ("release.yml", "images.yml"):
        declared = jobs(workflow)
        for name, job in declared.items():
            if any(job["permissions"].get(scope) == "write" for scope in scopes):
                assert "tested" in needed(declared, name), (workflow, name)


def test_every_stated_python_is_tested() -> None:
    isolated = jobs("ci.yml")["isolation"]["strategy"]["matrix"]
    nightly = jobs("nightly.yml")["pythons"]["strategy"]["matrix"]
    assert ["3.11", *nightly["python"]] == isolated["python"]
    for path in [*ROOT.glob("packages/*/pyproject.toml"), *ROOT.glob("services/*/pyproject.toml")]:
        project = tomllib.loads(path.read_text())["project"]
        language = "Programming Language :: Python :: "
        stated = [
            line.removeprefix(language)
            for line in project["classifiers"]
            if line.startswith(language)
        ]
        own = [run["python"] for run in isolated["include"] if run["package"] == project["name"]]
        assert set(stated) <= {*isolated["python"], *own}, path


def test_image_is_pushed_only_after_it_was_tried() -> None:
    steps = [step.get("run", "") for step in jobs("images.yml")["push"]["steps"]]

    def index(text: str) -> int:
        [position] = [number for number, step in enumerate(steps) if text in step]
        return position

    assert index("integration.try_images") < index("docker login") < index("type=registry")
    builds = [step for step in steps if "buildx build" in step]
    [pushed] = [step for step in steps if "type=registry" in step]
    # Both builds have the same arguments, so the builder pushes the image that was tried.
    assert len(builds) == 2
    for step in builds:
        assert '--file "docker/$FOLDER/Dockerfile" --build-arg "FIND_LINKS=$FIND_LINKS"' in step
    assert "rewrite-timestamp=true" in pushed


@pytest.mark.parametrize(
    ("tag", "version", "changes", "fragment", "ok"),
    [
        ("grpo-trainer==0.2.0", "0.2.0", "## 0.2.0 (2026-01-01)", None, True),
        ("grpo-trainer==0.2.0", "0.1.0", "## 0.2.0 (2026-01-01)", None, False),
        ("grpo-trainer==0.2.0", "0.2.0", "## 0.1.0 (2026-01-01)", None, False),
        ("grpo-trainer==0.2.0", "0.2.0", "## 0.2.0 (2026-01-01)", "+more.fixed.md", False),
        ("column-io==0.2.0", "0.2.0", "## 0.2.0 (2026-01-01)", None, False),
    ],
)
def test_image_is_pushed_only_with_its_version_and_notes(
    tag: str, version: str, changes: str, fragment: str | None, ok: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "services" / "trainer"
    (folder / "changelog.d").mkdir(parents=True)
    (folder / "changelog.d" / ".gitignore").touch()
    (folder / "pyproject.toml").write_text(f'[project]\nversion = "{version}"\n')
    (folder / "CHANGELOG.md").write_text(f"# Changelog\n\n{changes}\n")
    if fragment:
        (folder / "changelog.d" / fragment).write_text("More.\n")
    [run] = [
        step["run"]
        for step in jobs("images.yml")["push"]["steps"]
        if "pyproject.toml" in step.get("run", "")
    ]
    environment = tmp_path / "environment"
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", run],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "GITHUB_REF_NAME": tag, "GITHUB_ENV": str(environment)},
        check=False,
        capture_output=True,
        timeout=60,
    )
    assert (done.returncode == 0) is ok, done.stderr
    assert environment.exists() is ok


class Repository:
    """A repository with one commit, its clone, and a substitute for the program ``gh``."""

    def __init__(self, folder: Path) -> None:
        self.origin, self.clone, self.bin = (folder / name for name in ("origin", "clone", "bin"))
        self.bin.mkdir()
        git(folder, "init", "--quiet", "--initial-branch=main", str(self.origin))
        self.commit(self.origin)
        git(folder, "clone", "--quiet", str(self.origin), str(self.clone))

    def commit(self, at: Path) -> str:
        git(at, "commit", "--quiet", "--allow-empty", "--message", "one")
        return git(at, "rev-parse", "HEAD")

    def answer(self, runs: list[dict[str, str]]) -> None:
        """Write a `gh` that answers `gh run list --json` with ``runs``; jq evaluates its --jq."""
        gh = self.bin / "gh"
        gh.write_text(
            f'#!/bin/sh\necho "$@" >{self.bin}/arguments\n'
            'while [ "$1" != --jq ]; do shift; done\n'
            f"echo '{json.dumps(runs)}' | jq --raw-output \"$2\"\n"
        )
        gh.chmod(0o755)

    def tested(self, commit: str) -> subprocess.CompletedProcess[str]:
        path = f"{self.bin}:{os.environ['PATH']}"
        return subprocess.run(
            [TESTED, commit],
            cwd=self.clone,
            env={"PATH": path, "GITHUB_REPOSITORY": "some/where"},
            capture_output=True,
            text=True,
            timeout=60,
        )


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


PASSED = {"status": "completed", "conclusion": "success"}


@pytest.mark.debian("jq")
def test_commit_of_main_whose_tests_passed_is_released(repository: Repository) -> None:
    repository.answer([PASSED])
    commit = git(repository.clone, "rev-parse", "HEAD")
    assert repository.tested("HEAD").returncode == 0
    arguments = (repository.bin / "arguments").read_text()
    assert f"--workflow ci.yml --branch main --event push --commit {commit} " in arguments
    # An older commit is released too: main advances while a release is reviewed.
    repository.commit(repository.origin)
    git(repository.clone, "fetch", "--quiet")
    assert repository.tested(commit).returncode == 0


@pytest.mark.debian("jq")
@pytest.mark.parametrize(
    ("runs", "result"),
    [
        ([], "no run"),
        ([{"status": "completed", "conclusion": "failure"}], "failure"),
        ([{"status": "completed", "conclusion": "cancelled"}], "cancelled"),
        ([{"status": "in_progress", "conclusion": ""}], "in_progress"),
    ],
)
def test_commit_whose_tests_did_not_pass_is_refused(
    runs: list[dict[str, str]], result: str, repository: Repository
) -> None:
    repository.answer(runs)
    done = repository.tested("HEAD")
    assert done.returncode == 1
    assert f"on main: found '{result}'; expected success" in done.stderr


@pytest.mark.debian("jq")
def test_commit_that_is_not_on_main_is_refused(repository: Repository) -> None:
    repository.answer([PASSED])
    commit = repository.commit(repository.clone)
    done = repository.tested("HEAD")
    assert (done.returncode, done.stderr) == (
        1,
        f"tested: {commit} is not on main; tag a commit that is\n",
    )
    assert repository.tested("nothing").returncode == 1
