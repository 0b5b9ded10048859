"""Files of other projects are those of their releases, with their licenses."""

import hashlib
from pathlib import Path

import pytest

import dataplane_admin

VENDOR = Path(dataplane_admin.__file__).parent / "pages" / "vendor"


@pytest.mark.parametrize("folder", list(VENDOR.iterdir()), ids=lambda folder: folder.name)
def test_vendored_files_are_unchanged(folder):
    lines = (folder / "SHA256SUMS").read_text().splitlines()
    digests = dict(reversed(line.split("  ")) for line in lines if not line.startswith("#"))
    assert "LICENSE" in digests
    assert digests == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.iterdir()
        if path.name != "SHA256SUMS"
    }
