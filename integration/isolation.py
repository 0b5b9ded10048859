"""Build each package's wheel without workspace sources, and test it in a separate environment.

``make isolation`` runs the tests that are not marked ``slow``. ``make test`` includes it, and runs
these tests nowhere else. An environment has the package's wheel, its dependencies and the test
tools, but not the workspace. A dependency that is a package of the workspace is a wheel, too.

Before a release, options choose another Python, the lowest declared versions of dependencies, or
released packages in place of those of the checkout.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
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
TESTED_WITH = {  # further requirements of a package's tests
    "dataplane-core": ["dataplane-core[checkpoint,testing]", "pillow>=10", "pydantic>=2.5"],
    "dataplane-tq": ["dataplane-core[testing]"],
    "observability": ["dataplane-core[testing]", "observability[sdk,verl,views]"],
    "rollout-actor": ["rollout-actor[vllm]"],
    "refit-mx": ["refit-mx[fleet,nixl]", "opentelemetry-sdk>=1.30", "psutil>=5.9"],
}
SHARED_BY_TESTS = ["fork_server.py", "lean_ray.py", "rare_gc.py"]  # modules of integration/
TIMEOUT_S = 1800
_SITE = "import sysconfig; print(sysconfig.get_path('purelib'))"
LANES = 3
LONGEST_FIRST = ("dataplane-tq", "observability", "refit-mx")


@dataclass(frozen=True)
class Job:
    """Settings shared by all packages.

    Attributes:
        uv: path of the program.
        folder: folder of all files that the job makes.
        wheels: folder of the workspace's wheels.
        sources: checkout that a package and its tests come from, by package; default: this one.
        python: an interpreter, or a version for uv to find.
        resolution: value of uv's ``--resolution``.
        cutoff: later uploads to the registry are ignored.
    """

    uv: str
    folder: Path
    wheels: Path
    sources: dict[str, Path]
    python: str
    resolution: str
    cutoff: str


def main() -> int:
    """Run the job and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("packages", nargs="*", metavar="PACKAGE", help="all, if none is named")
    parser.add_argument("--python", default=sys.executable, help="interpreter or version")
    parser.add_argument("--resolution", default="highest", choices=["highest", "lowest-direct"])
    parser.add_argument(
        "--released",
        action="append",
        default=[],
        metavar="PACKAGE==VERSION",
        help="take this package from its tag, not from the checkout",
    )
    options = parser.parse_args()
    chosen = options.packages or list(PACKAGES)
    for name in [*chosen, *(tag.partition("==")[0] for tag in options.released)]:
        if name not in PACKAGES:
            parser.error(f"unknown package {name!r}; expected one of {', '.join(PACKAGES)}")
    uv = os.environ.get("UV") or shutil.which("uv") or str(ROOT / ".tools" / "bin" / "uv")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    pins = project["tool"]["uv"]["constraint-dependencies"]
    with tempfile.TemporaryDirectory(prefix="isolation-") as name:
        folder = Path(name)
        job = Job(
            uv,
            folder,
            folder / "wheels",
            {tag.partition("==")[0]: at_tag(tag, folder) for tag in options.released},
            options.python,
            options.resolution,
            project["tool"]["uv"]["exclude-newer"],
        )
        for package in PACKAGES:
            print(f"isolation: building the wheel of {package}", flush=True)
            build(job, package)
        # Pin the wheels just built, so that a registry's packages of the same name are not taken.
        built = ["{}=={}".format(*wheel.name.split("-")[:2]) for wheel in job.wheels.glob("*.whl")]
        (folder / "constraints.txt").write_text("\n".join([*pins, *built]) + "\n")
        # In parallel, since tests that start clusters mostly wait; the longest job starts first.
        with ThreadPoolExecutor(LANES) as lanes:
            checks = {
                package: lanes.submit(check, job, package)
                for package in [
                    *(package for package in LONGEST_FIRST if package in chosen),
                    *(package for package in chosen if package not in LONGEST_FIRST),
                ]
            }
            try:
                for checked in as_completed(checks.values()):
                    print(checked.result(), flush=True)
            except BaseException:  # start no further package after an interrupt or a failure
                lanes.shutdown(cancel_futures=True)
                raise
    print(f"isolation: {len(chosen)} passed, 0 failed")
    return 0


def at_tag(tag: str, folder: Path) -> Path:
    """Unpack the repository at a tag below ``folder``, and return its folder."""
    source = folder / f"source-{tag}"
    source.mkdir()
    archive = folder / f"{tag}.tar"
    run("git", "archive", "--output", str(archive), tag, cwd=ROOT)
    shutil.unpack_archive(archive, source, filter="data")
    return source


def build(job: Job, package: str) -> None:
    """Build a package's wheel."""
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
    """Install a package from its wheel, import it and run its tests; return pytest's output."""
    uv, folder = job.uv, job.folder
    environment = folder / package
    print(f"isolation: installing {package} into a separate environment", flush=True)
    run(uv, "venv", "--quiet", "--python", job.python, str(environment), cwd=folder)
    python = environment / "bin" / "python"
    # --find-links replaces UV_FIND_LINKS, so its folders are repeated.
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
    if job.python == sys.executable:
        share_bytecode(Path(output(str(python), "-c", _SITE, cwd=folder)))
    # Keep the repository's layout, so that tests find the pages of docs/.
    checkout = folder / f"checkout-{package}"
    tests = checkout / "packages" / package
    unwanted = shutil.ignore_patterns("src", "__pycache__")
    source = job.sources.get(package, ROOT)
    shutil.copytree(source / "packages" / package, tests, ignore=unwanted)
    shutil.copytree(source / "docs", checkout / "docs", dirs_exist_ok=True)
    (checkout / "integration").mkdir()
    for name in SHARED_BY_TESTS:
        shutil.copy2(source / "integration" / name, checkout / "integration")
    module = PACKAGES[package]
    location = output(str(python), "-c", f"import {module}; print({module}.__file__)", cwd=tests)
    if not location.startswith(str(environment)):
        raise SystemExit(f"{package}: imported from {location}, not from its wheel")
    print(f"isolation: testing {package}", flush=True)
    printed = run(
        str(python),
        "-m",
        "pytest",
        "-p",
        "integration.rare_gc",
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
        PYTHONPATH=str(checkout),
    )
    return f"== {package}\n{printed}"


def share_bytecode(site_packages: Path) -> None:
    """Copy this environment's bytecode of unchanged files into another environment.

    Otherwise the first processes that import torch there each spend 13 s to compile it and what it
    imports.
    """
    own = Path(sysconfig.get_path("purelib"))
    for compiled in own.rglob("__pycache__/*.pyc"):
        folder = compiled.parent.parent
        source = folder / f"{compiled.name.partition('.')[0]}.py"
        other = site_packages / source.relative_to(own)
        # Python compares the same time and size before it uses bytecode.
        if _stamp(source) is not None and _stamp(source) == _stamp(other):
            target = site_packages / compiled.relative_to(own)
            target.parent.mkdir(exist_ok=True)
            if not target.exists():
                shutil.copy2(compiled, target)


def _stamp(file: Path) -> tuple[int, int] | None:
    try:
        status = file.stat()
    except FileNotFoundError:
        return None
    return int(status.st_mtime), status.st_size


def output(*command: str, cwd: Path) -> str:
    """Return what a command prints."""
    return subprocess.run(
        command, cwd=cwd, check=True, capture_output=True, text=True, timeout=120
    ).stdout.strip()


def run(*command: str, cwd: Path, **environment: str) -> str:
    """Run a command and return its output; a failure ends the job."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **environment},
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
