"""Run tests in a separate network, where a firewall silently drops packets.

To both ends, the peer looks alive and silent. The network is a kernel namespace that ends with the
test's process; the host's network is not changed.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

_NAMESPACES = (
    ("unshare", "--net", "--mount"),
    ("unshare", "--user", "--map-root-user", "--net", "--mount"),
)
_TIMEOUT_S = 180.0
_RULES = """
flush ruleset
table inet drops {{
  chain input {{
    type filter hook input priority 0
    {}
  }}
}}
"""
_LISTENING = "0A"


@functools.cache
def _command() -> tuple[str, ...] | None:
    """Return a command that runs a program in a separate network; None if that is impossible."""
    for command in _NAMESPACES:
        try:
            tried = subprocess.run([*command, "nft", "list", "ruleset"], capture_output=True)
        except FileNotFoundError:
            continue
        if not tried.returncode:
            return command
    return None


def in_own_network(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test in a process with a separate network, by its name and arguments."""

    @functools.wraps(test)
    def run(**arguments: object) -> None:
        command = _command()
        if command is None:
            pytest.skip("needs network namespaces, and the packages util-linux and nftables")
        module = Path(inspect.getfile(test)).stem
        values = [f"{name}={value}" for name, value in arguments.items()]
        ran = subprocess.run(
            [*command, sys.executable, __file__, module, test.__name__, *values],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            env={name: value for name, value in os.environ.items() if "proxy" not in name.lower()},
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr

    return pytest.mark.debian("iproute2", "nftables")(run)


def drop(*ports: int) -> None:
    """Drop packets to and from these ports, and no others."""
    wanted = ", ".join(map(str, ports))
    _rules(f"tcp dport {{ {wanted} }} drop; tcp sport {{ {wanted} }} drop" if ports else "")


def restore() -> None:
    """Drop no more packets."""
    drop()


def drop_name_service() -> None:
    """Make name resolution use a server whose packets are dropped."""
    resolver = Path("/tmp/own_network.resolv.conf")
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/tmp"], check=True)
    resolver.write_text("nameserver 127.0.0.1\n")
    subprocess.run(["mount", "--bind", resolver, "/etc/resolv.conf"], check=True)
    _rules("udp dport 53 drop")


def listening_ports() -> set[int]:
    """Return the TCP ports with a listening socket."""
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path("/proc/net", table).read_text().splitlines()[1:]
    ]
    return {int(line[1].rpartition(":")[2], 16) for line in lines if line[3] == _LISTENING}


def _rules(rules: str) -> None:
    subprocess.run(["nft", "-f", "-"], input=_RULES.format(rules), text=True, check=True)


if __name__ == "__main__":
    module_name, test_name, *values = sys.argv[1:]
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    original = inspect.unwrap(getattr(importlib.import_module(module_name), test_name))
    original(**dict(value.split("=", 1) for value in values))
