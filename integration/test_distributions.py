"""The distributions to upload: for each package, an sdist and the wheel built from it."""

from __future__ import annotations

import email
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from pathlib import Path

import pytest
from integration.environments import ROOT, UV

PACKAGES = {path.parent.name for path in (ROOT / "packages").glob("*/pyproject.toml")}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build all distributions, and return their folder."""
    folder = tmp_path_factory.mktemp("distributions")
    for package in sorted(PACKAGES):
        subprocess.run(
            [UV, "build", "--quiet", "--no-sources", "--package", package, "--out-dir", folder],
            cwd=ROOT,
            check=True,
            timeout=300,
        )
    return folder


def wheel(folder: Path, package: str) -> zipfile.ZipFile:
    [path] = folder.glob(f"{package.replace('-', '_')}-*.whl")
    return zipfile.ZipFile(path)


def metadata(archive: zipfile.ZipFile) -> Message:
    [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    return email.message_from_bytes(archive.read(name))


def test_twine_accepts_the_distributions(built: Path) -> None:
    files = sorted(str(path) for path in built.iterdir() if path.suffix in (".whl", ".gz"))
    assert len(files) == 2 * len(PACKAGES)
    checked = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", *files],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_wheel_has_types_a_license_and_metadata(built: Path, package: str) -> None:
    with wheel(built, package) as archive:
        names, headers = archive.namelist(), metadata(archive)
    module = package.replace("-", "_")
    assert f"{module}/py.typed" in names
    assert [name for name in names if name.endswith(".dist-info/licenses/LICENSE")]
    assert {name.split("/")[0] for name in names} == {
        module,
        next(name.split("/")[0] for name in names if ".dist-info/" in name),
    }
    assert headers["License-Expression"] == "Apache-2.0"
    assert headers["Requires-Python"] == ">=3.11"
    assert "Typing :: Typed" in headers.get_all("Classifier", [])
    assert headers["Description-Content-Type"] == "text/markdown"
    assert headers["Summary"]
    assert headers.get_all("Project-URL") is None  # there is none yet
    # A relative link is broken on the package's page at the registry.
    links = re.findall(r"\]\(([^)\s]*)\)", str(headers.get_payload()))
    assert not [link for link in links if not re.match(r"https?://|#", link)]


def test_installed_wheel_has_the_vllm_plugin(built: Path, tmp_path: Path) -> None:
    with wheel(built, "refit-mx") as archive:
        archive.extractall(tmp_path)
    # vLLM loads the entry point this way. Without vLLM, calling it must do nothing.
    program = (
        "from importlib.metadata import entry_points\n"
        "[plugin] = entry_points(group='vllm.general_plugins', name='refit_mx')\n"
        "plugin.load()()\n"
        "import refit_mx\n"
        "print(refit_mx.__file__)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == str(tmp_path / "refit_mx" / "__init__.py")
    assert not ran.stderr


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_source_distribution_has_tests_and_changelog(built: Path, package: str) -> None:
    [path] = built.glob(f"{package.replace('-', '_')}-*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {"README.md", "CHANGELOG.md", "LICENSE", "PKG-INFO", "pyproject.toml"} <= names
    assert any(name.startswith("tests/test_") for name in names)
    assert not [name for name in names if "__pycache__" in name]


def test_admin_service_installs_without_torch_and_ray(
    built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:

    def run(*words: str | Path) -> str:
        done = subprocess.run(
            words, cwd=ROOT, check=False, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    run(UV, "build", "--quiet", "--wheel", "--no-sources", "--package", "dataplane-admin",
        "--out-dir", tmp_path)  # fmt: skip
    environment = tmp_path / "environment"
    run(UV, "venv", "--quiet", "--python", sys.executable, environment)
    python = environment / "bin" / "python"
    # --find-links replaces UV_FIND_LINKS, so its folders are repeated.
    folders = [tmp_path, built, *os.environ.get("UV_FIND_LINKS", "").replace(",", " ").split()]
    built_here = [
        f"{wheel.name.split('-')[0]}=={wheel.name.split('-')[1]}"
        for folder in (tmp_path, built)
        for wheel in folder.glob("*.whl")
    ]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]
    pins = tmp_path / "constraints.txt"
    pins.write_text("\n".join([*project["constraint-dependencies"], *built_here]))
    find_links = [word for folder in folders for word in ("--find-links", folder)]
    run(UV, "pip", "install", "--quiet", "--python", python, *find_links, "--constraint", pins,
        "--exclude-newer", project["exclude-newer"], "dataplane-admin")  # fmt: skip

    listed = json.loads(run(UV, "pip", "list", "--python", python, "--format", "json"))
    names = {each["name"] for each in listed}
    assert {"dataplane-admin", "dataplane-core", "observability"} <= names
    assert not names & {"torch", "tensordict", "ray", "transferqueue", "dataplane-tq"}
    size = sum(path.stat().st_size for path in environment.rglob("*") if path.is_file())
    with capsys.disabled():
        print(f"\ndataplane-admin alone: {len(names)} distributions, {size / 1e6:.0f} MB")
    assert size < 200e6
    assert "serve" in run(environment / "bin" / "dataplane-admin", "--help")
