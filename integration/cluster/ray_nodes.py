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
_PATIENCE_S = 90.0
_RAY_NODE = Path(__file__).parents[2] / "docker" / "trainer" / "ray-node"
# As the images have it: a node that does not answer is dead after some twelve seconds.
_NOTICES_SOON = dict(
    re.findall(r'export (RAY_health_check_\w+)="\$\{\1:-(\d+)\}"', _RAY_NODE.read_text())
)
_RAY = str(Path(sys.executable).with_name("ray"))


class RayNodes:
    """The first machine has the head. A node offers a resource named as its machine, and a "rank".

    Args:
        machines: that get a node.
        folder: for Ray's files; a short path, since sockets lie below it.
        cpus: that each node offers.
        environment: more of it.

    Raises:
        MachinesError: a node does not start.

    Attributes:
        address: of the cluster, for drivers on the first machine.
        environment: what every process of the cluster and its drivers has to have: the token
            without which Ray answers nobody.
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
            **_NOTICES_SOON,
            **(environment or {}),
        }
        self.head, *others = machines.machines.values()
        self.address = f"{self.head.address}:{_PORT}"
        self._start(self.head, "--head", "--port", str(_PORT), "--include-dashboard=false")
        for machine in others:
            self.join(machine)

    def join(self, machine: Machine) -> None:
        """Start a machine's node; returns when the cluster has it."""
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
        until = time.monotonic() + _PATIENCE_S
        while "Ray runtime started." not in (told := log.read_text()):
            if node.poll() is not None or time.monotonic() > until:
                raise MachinesError(f"Ray's node on {machine.name}: {told[-2000:]}")
            time.sleep(0.1)

    def rejoin(self, machine: Machine) -> None:
        """Start the node of a machine again, whose former one is dead or counts as dead."""
        machine.kill()
        self._nodes[machine.name].wait(timeout=_PATIENCE_S)
        self.join(machine)
