"""Builds each package's wheel without workspace sources and tests it in an environment of its own.

An environment holds the package's wheel, the wheels of ours that it depends on, what those declare,
and what the tests need; nothing of the workspace is on the path. Run as ``make isolation``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor, as_completed
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
    "refit-mx": ["refit-mx[fleet,nixl]", "psutil>=5.9"],
}
TIMEOUT_S = 900
LANES = 2
LONGEST = "dataplane-tq"


def main() -> int:
    """Run the job; the exit status."""
    uv = os.environ.get("UV") or shutil.which("uv") or str(ROOT / ".tools" / "bin" / "uv")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    pins = project["tool"]["uv"]["constraint-dependencies"]
    cutoff = project["tool"]["uv"]["exclude-newer"]
    chosen = sys.argv[1:] or list(PACKAGES)
    with tempfile.TemporaryDirectory(prefix="isolation-") as name:
        folder = Path(name)
        wheels = folder / "wheels"
        for package in PACKAGES:
            run(
                uv,
                "build",
                "--quiet",
                "--wheel",
                "--no-sources",
                "--package",
                package,
                "--out-dir",
                str(wheels),
                cwd=ROOT,
            )
        (folder / "constraints.txt").write_text("\n".join(pins) + "\n")
        # Beside each other, since those that start clusters mostly wait; the longest comes first.
        with ThreadPoolExecutor(LANES) as lanes:
            checks = {
                package: lanes.submit(check, uv, package, folder, wheels, cutoff)
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


def check(uv: str, package: str, folder: Path, wheels: Path, cutoff: str) -> str:
    """Install one package from its wheel, import it, and run its own tests; what that printed."""
    environment = folder / package
    run(uv, "venv", "--quiet", "--python", sys.executable, str(environment), cwd=folder)
    python = environment / "bin" / "python"
    # The option replaces the variable, so a folder of local wheels is named beside our own.
    folders = [str(wheels), *os.environ.get("UV_FIND_LINKS", "").replace(",", " ").split()]
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
        cutoff,
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
    shutil.copytree(ROOT / "packages" / package, tests, ignore=unwanted)
    shutil.copytree(ROOT / "docs", checkout / "docs", dirs_exist_ok=True)
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
    printed = run(
        str(python),
        "-m",
        "pytest",
        "-q",
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
