"""A Ray cluster with a node on each machine."""

from __future__ import annotations

import json
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from integration.cluster.machines import Machine, Machines, MachinesError

_PORT = 6379
_TIMEOUT_S = 90.0
_RAY_NODE = Path(__file__).parents[2] / "docker" / "trainer" / "ray-node"
# The images' settings: a node that does not answer counts as dead after about twelve seconds.
_HEALTH_CHECKS = dict(
    re.findall(r'export (RAY_health_check_\w+)="\$\{\1:-(\d+)\}"', _RAY_NODE.read_text())
)
_RAY = str(Path(sys.executable).with_name("ray"))


class RayNodes:
    """A Ray cluster with one node on each machine; the head is on the first.

    A node has the resources "rank" and its machine's name.

    Args:
        machines: machines that get a node.
        folder: folder of Ray's files; a short path, since sockets are below it.
        cpus: CPUs of each node.
        environment: further environment variables.

    Raises:
        MachinesError: a node does not start.

    Attributes:
        address: address of the cluster, for drivers on the first machine.
        environment: variables that every process of the cluster and every driver needs, such as
            Ray's token.
    """

    def __init__(
        self,
        machines: Machines,
        folder: Path,
        *,
        cpus: int = 4,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._machines = machines
        self._folder = folder
        self._cpus = cpus
        self._nodes: dict[str, subprocess.Popen[str]] = {}
        self.environment = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            **_HEALTH_CHECKS,
            **(environment or {}),
        }
        self.head, *others = machines.machines.values()
        self.address = f"{self.head.address}:{_PORT}"
        self._start(self.head, "--head", "--port", str(_PORT), "--include-dashboard=false")
        for machine in others:
            self.join(machine)

    def join(self, machine: Machine) -> None:
        """Start a machine's node and wait until it has joined the cluster."""
        self._start(machine, "--address", self.address)

    def _start(self, machine: Machine, *arguments: str) -> None:
        log = self._folder / f"{machine.name}.log"
        command = [
            *(_RAY, "start", *arguments, "--block", "--disable-usage-stats"),
            *("--node-ip-address", machine.address, "--num-cpus", str(self._cpus)),
            *("--resources", json.dumps({machine.name: 100, "rank": 1})),
            *("--object-store-memory", str(256 << 20)),
        ]
        if "--head" in arguments:
            command += ["--temp-dir", str(self._folder / "ray")]
        with log.open("w") as out:
            node = machine.start(command, env=self.environment, out=out)
        self._nodes[machine.name] = node
        deadline = time.monotonic() + _TIMEOUT_S
        while "Ray runtime started." not in (output := log.read_text()):
            if node.poll() is not None or time.monotonic() > deadline:
                raise MachinesError(f"Ray's node on {machine.name} failed: {output[-2000:]}")
            time.sleep(0.1)

    def rejoin(self, machine: Machine) -> None:
        """Restart the node of a machine that is dead or counts as dead."""
        machine.kill()
        self._nodes[machine.name].wait(timeout=_TIMEOUT_S)
        self.join(machine)
