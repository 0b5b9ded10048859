"""Find the Debian packages that the tests need, install them, or print the command that does.

``make test`` runs this file first, with any Python from 3.11 on, before anything is installed.
`conftest.py` uses it to skip the tests whose package is missing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Need:
    """A dependency of tests, and the Debian packages that install it.

    Attributes:
        packages: names for apt-get.
        programs: names searched on PATH and in /usr/sbin and /sbin.
        files: glob patterns below ``/``; at least one must match.
        libraries: names in the loader's cache.
        fixtures: a test that uses one of these fixtures needs this.
        parameters: a test with one of these parameter values needs this.
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
        ("postgresql",),
        files=("usr/lib/postgresql/*/bin/initdb",),
        fixtures=("postgresql",),
        parameters=("postgresql",),
    ),
    "nginx": Need(("nginx-light",), ("nginx",), fixtures=("behind_nginx",)),
    "jq": Need(("jq",), ("jq",)),
    "openssl": Need(("openssl",), ("openssl",), fixtures=("certificate", "secrets")),
    "iproute2": Need(("iproute2",), ("ip",)),
    # Drops a peer's packets, in a network namespace.
    "nftables": Need(("nftables",), ("nft",)),
    # Mooncake's transfer engine links against these.
    "mooncake": Need(
        ("libibverbs1", "libnuma1", "libcurl4"),
        libraries=("libibverbs.so.1", "libnuma.so.1", "libcurl.so.4"),
        parameters=("mooncake_cpu",),
    ),
    # At run time, vLLM compiles with torch's inductor.
    "vllm": Need(("g++", "python3-dev"), ("g++",), files=("usr/include/python3*/Python.h",)),
}
"""Needs by name; a test without these fixtures and parameters names its need in a mark `debian`."""
POLICY = Path("/usr/sbin/policy-rc.d")
"""A program that Debian's packages run; its status 101 forbids starting services."""


def missing() -> list[str]:
    """Return the names of the `NEEDS` that this machine lacks, in the table's order."""
    cache = ""
    if ldconfig := _program("ldconfig"):
        cache = subprocess.run(
            [ldconfig, "-p"], capture_output=True, text=True, timeout=10, check=False
        ).stdout
    return [name for name, need in NEEDS.items() if not _present(need, cache)]


def packages_of(names: list[str]) -> list[str]:
    """Return the Debian packages of the `NEEDS` called ``names``."""
    return [package for name in names for package in NEEDS[name].packages]


def main() -> int:
    """Install missing packages if root on Debian, else print the command; return the exit status.

    With ``--check``, install nothing, and return 1 if a need is missing; with ``--check NAME ...``,
    only if one of these needs is missing.
    """
    names = missing()
    if sys.argv[1:2] == ["--check"]:
        return any(name in names for name in sys.argv[2:] or names)
    lacking = packages_of(names)
    if not lacking:
        print("Debian packages: the tests have all that they need.")
        return 0
    install = ["apt-get", "install", "--yes", "--no-install-recommends", *lacking]
    if os.geteuid() == 0 and shutil.which("apt-get"):
        print(f"Debian packages: installing {', '.join(lacking)}", flush=True)
        for command in (["apt-get", "update"], install):
            with _services_forbidden():
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
    print("Tests that need them are left out; a list follows before the first test.", flush=True)
    return 0


@contextmanager
def _services_forbidden() -> Iterator[None]:
    """Keep installed packages from starting services: nginx would listen on port 80."""
    if POLICY.exists():
        yield
        return
    POLICY.write_text("#!/bin/sh\nexit 101\n")
    POLICY.chmod(0o755)
    try:
        yield
    finally:  # also after Ctrl-C: a remaining file would forbid services for good
        POLICY.unlink(missing_ok=True)


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
