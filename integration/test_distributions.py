"""What would be uploaded: a source distribution and a wheel made of it, for each package."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {path.parent.name for path in (ROOT / "packages").glob("*/pyproject.toml")}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all of them."""
    folder = tmp_path_factory.mktemp("distributions")
    uv = shutil.which("uv") or str(ROOT / ".tools" / "bin" / "uv")
    for package in sorted(PACKAGES):
        subprocess.run(
            [uv, "build", "--quiet", "--no-sources", "--package", package, "--out-dir", folder],
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


def test_twine_finds_nothing_to_object_to(built: Path) -> None:
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
def test_a_wheel_is_typed_licensed_and_says_what_it_is(built: Path, package: str) -> None:
    with wheel(built, package) as archive:
        names, told = archive.namelist(), metadata(archive)
    module = package.replace("-", "_")
    assert f"{module}/py.typed" in names
    assert [name for name in names if name.endswith(".dist-info/licenses/LICENSE")]
    assert {name.split("/")[0] for name in names} == {
        module,
        next(name.split("/")[0] for name in names if ".dist-info/" in name),
    }
    assert told["License-Expression"] == "Apache-2.0"
    assert told["Requires-Python"] == ">=3.11"
    assert "Typing :: Typed" in told.get_all("Classifier", [])
    assert told["Description-Content-Type"] == "text/markdown"
    assert told["Summary"]
    assert told.get_all("Project-URL") is None  # there is none yet
    # A link to a file of the repository leads nowhere from the page of a package.
    links = re.findall(r"\]\(([^)\s]*)\)", str(told.get_payload()))
    assert not [link for link in links if not re.match(r"https?://|#", link)]


def test_vllm_finds_the_plugin_of_an_installed_wheel(built: Path, tmp_path: Path) -> None:
    with wheel(built, "refit-mx") as archive:
        archive.extractall(tmp_path)
    # As vLLM looks for it. It is called without vLLM, which must do no harm.
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
def test_a_source_distribution_brings_its_tests_and_its_changes(built: Path, package: str) -> None:
    [path] = built.glob(f"{package.replace('-', '_')}-*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {"README.md", "CHANGELOG.md", "LICENSE", "PKG-INFO", "pyproject.toml"} <= names
    assert any(name.startswith("tests/test_") for name in names)
    assert not [name for name in names if "__pycache__" in name]
