"""Builds each package's wheel without workspace sources and tests it in an environment of its own.

These are the tests that are not marked ``slow``; they run nowhere else.

An environment holds the package's wheel, the wheels of ours that it depends on, what those declare,
and what the tests need; nothing of the workspace is on the path. Run as ``make isolation``.

Releases take it further: other Pythons, the lowest versions that a package says it works with, and
packages of ours as they were released, in place of those of the checkout.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "dataplane-core": "dataplane_core",
    "column-io": "column_io",
    "dataplane-tq": "dataplane_tq",
    "rollout-actor": "rollout_actor",
    "refit-mx": "refit_mx",
    "observability": "observability",
}
TEST_TOOLS = ["pytest>=8.2", "pytest-timeout>=2.3", "hypothesis>=6.100"]
TESTED_WITH = {  # what a package's own tests need besides the package
    "dataplane-core": ["dataplane-core[checkpoint,testing]"],
    "dataplane-tq": ["dataplane-core[testing]"],
    "observability": ["dataplane-core[testing]", "observability[sdk,views]"],
    "refit-mx": ["refit-mx[fleet,nixl]", "opentelemetry-sdk>=1.30", "psutil>=5.9"],
}
TIMEOUT_S = 1800
LANES = 3
LONGEST = "dataplane-tq"


@dataclass(frozen=True)
class Job:
    """What is the same for all packages.

    Attributes:
        uv: the program.
        folder: where everything is made.
        wheels: those of ours that are tested, and tested with.
        sources: of each package, the repository that it comes from, its tests too.
        python: an interpreter, or a version that uv finds one for.
        resolution: of the versions of what they depend on, as uv's option has it.
        cutoff: what was published later is not seen.
    """

    uv: str
    folder: Path
    wheels: Path
    sources: dict[str, Path]
    python: str
    resolution: str
    cutoff: str


def main() -> int:
    """Run the job; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("packages", nargs="*", metavar="PACKAGE", help="all, if none is named")
    parser.add_argument("--python", default=sys.executable, help="interpreter or version")
    parser.add_argument("--resolution", default="highest", choices=["highest", "lowest-direct"])
    parser.add_argument(
        "--released",
        action="append",
        default=[],
        metavar="PACKAGE==VERSION",
        help="a tag: take this package from it, not from the checkout",
    )
    asked = parser.parse_args()
    chosen = asked.packages or list(PACKAGES)
    for name in [*chosen, *(tag.partition("==")[0] for tag in asked.released)]:
        if name not in PACKAGES:
            parser.error(f"{name!r} is no package; expected one of {', '.join(PACKAGES)}")
    uv = os.environ.get("UV") or shutil.which("uv") or str(ROOT / ".tools" / "bin" / "uv")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    pins = project["tool"]["uv"]["constraint-dependencies"]
    with tempfile.TemporaryDirectory(prefix="isolation-") as name:
        folder = Path(name)
        job = Job(
            uv,
            folder,
            folder / "wheels",
            {tag.partition("==")[0]: at_tag(tag, folder) for tag in asked.released},
            asked.python,
            asked.resolution,
            project["tool"]["uv"]["exclude-newer"],
        )
        for package in PACKAGES:
            print(f"isolation: building the wheel of {package}", flush=True)
            build(job, package)
        # Ours are those that were just built, whatever a registry has under the same names.
        ours = ["{}=={}".format(*wheel.name.split("-")[:2]) for wheel in job.wheels.glob("*.whl")]
        (folder / "constraints.txt").write_text("\n".join([*pins, *ours]) + "\n")
        # Beside each other, since those that start clusters mostly wait; the longest comes first.
        with ThreadPoolExecutor(LANES) as lanes:
            checks = {
                package: lanes.submit(check, job, package)
                for package in sorted(chosen, key=lambda package: package != LONGEST)
            }
            try:
                for checked in as_completed(checks.values()):
                    print(checked.result(), flush=True)
            except BaseException:
                lanes.shutdown(cancel_futures=True)
                raise
    print(f"isolation: {len(chosen)} passed, 0 failed")
    return 0


def at_tag(tag: str, folder: Path) -> Path:
    """The repository as it was at a tag."""
    there = folder / f"source-{tag}"
    there.mkdir()
    archive = folder / f"{tag}.tar"
    run("git", "archive", "--output", str(archive), tag, cwd=ROOT)
    shutil.unpack_archive(archive, there, filter="data")
    return there


def build(job: Job, package: str) -> None:
    """Make a package's wheel."""
    run(
        job.uv,
        "build",
        "--quiet",
        "--wheel",
        "--no-sources",
        "--package",
        package,
        "--out-dir",
        str(job.wheels),
        cwd=job.sources.get(package, ROOT),
    )


def check(job: Job, package: str) -> str:
    """Install one package from its wheel, import it, and run its own tests; what that printed."""
    uv, folder = job.uv, job.folder
    environment = folder / package
    print(f"isolation: installing {package} into an environment of its own", flush=True)
    run(uv, "venv", "--quiet", "--python", job.python, str(environment), cwd=folder)
    python = environment / "bin" / "python"
    # The option replaces the variable, so a folder of local wheels is named beside our own.
    folders = [str(job.wheels), *os.environ.get("UV_FIND_LINKS", "").replace(",", " ").split()]
    find_links = [word for name in folders for word in ("--find-links", name)]
    run(
        uv,
        "pip",
        "install",
        "--quiet",
        "--python",
        str(python),
        *find_links,
        "--constraint",
        str(folder / "constraints.txt"),
        "--exclude-newer",
        job.cutoff,
        "--resolution",
        job.resolution,
        package,
        *TESTED_WITH.get(package, []),
        *TEST_TOOLS,
        cwd=folder,
    )
    checkout = (
        folder / f"checkout-{package}"
    )  # laid out as here, so that tests find the pages of docs/
    tests = checkout / "packages" / package
    unwanted = shutil.ignore_patterns("src", "__pycache__")
    source = job.sources.get(package, ROOT)
    shutil.copytree(source / "packages" / package, tests, ignore=unwanted)
    shutil.copytree(source / "docs", checkout / "docs", dirs_exist_ok=True)
    module = PACKAGES[package]
    location = subprocess.run(
        [str(python), "-c", f"import {module}; print({module}.__file__)"],
        cwd=tests,
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    ).stdout.strip()
    if not location.startswith(str(environment)):
        raise SystemExit(f"{package}: imported from {location}, not from its wheel")
    print(f"isolation: testing {package}", flush=True)
    printed = run(
        str(python),
        "-m",
        "pytest",
        "-q",
        "-rs",
        "-o",
        "markers=slow\nlong\ndebian",
        "--import-mode=importlib",
        "--timeout=300",
        "-m",
        "not slow",
        "tests",
        cwd=tests,
    )
    return f"== {package}\n{printed}"


def run(*command: str, cwd: Path) -> str:
    """Run a command and return what it printed; a failure ends the job."""
    done = subprocess.run(
        command,
        cwd=cwd,
        timeout=TIMEOUT_S,
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode:
        print(done.stdout, flush=True)
        raise SystemExit(f"failed with status {done.returncode}: {' '.join(command)}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
