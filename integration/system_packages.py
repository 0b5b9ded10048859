"""Debian's packages that the tests need: look for them, install them, or print the line that does.

``make test`` begins with this file, run by any Python from 3.11 on before anything is installed.
pytest asks it as well, and leaves out the tests whose package is missing (`conftest.py`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Need:
    """A thing that tests use, and the Debian packages that bring it.

    Attributes:
        packages: what apt-get installs.
        programs: looked up on PATH and in Debian's folders for root.
        files: glob patterns below ``/``; one match is enough.
        libraries: names in the loader's cache.
        fixtures: tests that use one of these fixtures need this.
        parameters: tests with one of these values as a parameter need this.
    """

    packages: tuple[str, ...]
    programs: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    fixtures: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()


NEEDS: Mapping[str, Need] = {
    "chromium": Need(("chromium", "fonts-dejavu-core"), ("chromium",), fixtures=("browser",)),
    "postgresql": Need(
        ("postgresql",), files=("usr/lib/postgresql/*/bin/initdb",), parameters=("postgresql",)
    ),
    "nginx": Need(("nginx-light",), ("nginx",), fixtures=("behind_nginx",)),
    "jq": Need(("jq",), ("jq",)),
    "openssl": Need(("openssl",), ("openssl",), fixtures=("certificate", "secrets")),
    "iproute2": Need(("iproute2",), ("ip",)),
    # Drops the packets of a peer that falls silent, in a network namespace.
    "nftables": Need(("nftables",), ("nft",)),
    # Mooncake's transfer engine links against these.
    "mooncake": Need(
        ("libibverbs1", "libnuma1", "libcurl4"),
        libraries=("libibverbs.so.1", "libnuma.so.1", "libcurl.so.4"),
        parameters=("mooncake_cpu",),
    ),
}
"""The names are also the arguments of the mark ``debian``, for tests that neither column covers."""


def missing() -> list[str]:
    """Return the names in `NEEDS` of what this machine lacks, in the table's order."""
    cache = ""
    if ldconfig := _program("ldconfig"):
        cache = subprocess.run(
            [ldconfig, "-p"], capture_output=True, text=True, timeout=10, check=False
        ).stdout
    return [name for name, need in NEEDS.items() if not _present(need, cache)]


def packages_of(names: list[str]) -> list[str]:
    """Return the Debian packages that bring what ``names`` stand for."""
    return [package for name in names for package in NEEDS[name].packages]


def main() -> int:
    """Install what is missing as root on Debian, else print how to; return the exit status.

    With ``--check``, do neither: the status is 1 where something is missing.
    """
    lacking = packages_of(missing())
    if sys.argv[1:] == ["--check"]:
        return bool(lacking)
    if not lacking:
        print("Debian packages: all that the tests need are installed.")
        return 0
    install = ["apt-get", "install", "--yes", "--no-install-recommends", *lacking]
    if os.geteuid() == 0 and shutil.which("apt-get"):
        print(f"Debian packages: installing {', '.join(lacking)}", flush=True)
        for command in (["apt-get", "update"], _without_services(install)):
            status = subprocess.run(
                [*command, "--quiet"],
                env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
                stdin=subprocess.DEVNULL,
                check=False,
            ).returncode
            if status:
                print(f"failed with status {status}: {' '.join(command)}", file=sys.stderr)
                return 1
        return 0
    print(f"Debian packages: missing {', '.join(lacking)}. To install them:\n")
    print(f"    sudo apt-get update && sudo {' '.join(install)}\n")
    print(
        "The tests that need them are left out; a list follows before the first test.", flush=True
    )
    return 0


def _without_services(install: list[str]) -> list[str]:
    """Return ``install`` such that no package starts a service: nginx would listen on port 80."""
    policy = "/usr/sbin/policy-rc.d"  # asked by Debian's packages; 101 forbids it
    if os.path.exists(policy):
        return install
    script = (
        f"trap 'rm -f {policy}' EXIT; printf '#!/bin/sh\\nexit 101\\n' >{policy}; "
        f'chmod +x {policy}; "$@"'
    )
    return ["sh", "-c", script, "sh", *install]


def _present(need: Need, cache: str) -> bool:
    return (
        all(_program(name) for name in need.programs)
        and (not need.files or any(any(Path("/").glob(pattern)) for pattern in need.files))
        and all(f"\t{name} " in cache for name in need.libraries)
    )


def _program(name: str) -> str | None:
    path = os.environ.get("PATH", os.defpath)
    return shutil.which(name, path=os.pathsep.join([path, "/usr/sbin", "/sbin"]))


if __name__ == "__main__":
    sys.exit(main())
