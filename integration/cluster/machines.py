"""Machines made of namespaces of this one, with a link between them that can be cut.

A machine is a process that holds namespaces: a network with one interface, a separate /dev/shm, so
that no memory is shared by accident, and a host name. A switch in a further network namespace
connects the machines. A cut link only loses packets: both TCP ends still consider themselves
connected, as in a real network failure.

The namespaces end with their processes. The host's network is not changed. This needs root.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Self

_NET = "10.77.0"
_TIMEOUT_S = 30.0
_NAMESPACES = ("--net", "--mount", "--uts", "--ipc")
_WRONG_CLOCK = Path(__file__).with_name("wrong_clock.c")


class MachinesError(Exception):
    """Machine that cannot be created, or on which a command fails."""


class Machine:
    """A machine made of namespaces.

    Args:
        number: last number of its address.
        name: its host name.

    Attributes:
        address: address of its only interface besides loopback.
        name: its host name.
        clock: environment variables of its processes that `set_clock` has set.
    """

    def __init__(self, number: int, name: str) -> None:
        self.address = f"{_NET}.{number}"
        self.name = name
        self.clock: dict[str, str] = {}
        setup = (
            "mount -t tmpfs -o size=2g tmpfs /dev/shm && "
            f"echo {name} > /proc/sys/kernel/hostname && ip link set lo up && "
            "echo ready && exec sleep infinity"
        )
        self._holder = subprocess.Popen(
            # The kernel kills it when this process ends, even by SIGKILL.
            [
                "setpriv",
                "--pdeathsig",
                "KILL",
                "--",
                "unshare",
                *_NAMESPACES,
                "--",
                "sh",
                "-c",
                setup,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != "ready\n":
            _, errors = self._holder.communicate(timeout=_TIMEOUT_S)
            raise MachinesError(f"no namespaces for machine {name}: {errors.strip()}")

    @property
    def pid(self) -> int:
        """Id of the process that holds its namespaces."""
        return self._holder.pid

    def command(self, arguments: Sequence[str]) -> list[str]:
        """Return a command that runs ``arguments`` on the machine."""
        enter = ["nsenter", *_NAMESPACES, "-t", str(self.pid)]
        return ["setpriv", "--pdeathsig", "KILL", "--", *enter, "--", *arguments]

    def start(
        self,
        arguments: Sequence[str],
        *,
        env: dict[str, str] | None = None,
        out: IO[str] | None = None,
    ) -> subprocess.Popen[str]:
        """Start a command on it in a new session; its output goes to ``out``, or to pipes."""
        return subprocess.Popen(
            self.command(arguments),
            stdout=out or subprocess.PIPE,
            stderr=out or subprocess.PIPE,
            text=True,
            env={**_environment(), **self.clock, **(env or {})},
            start_new_session=True,
        )

    def run(
        self,
        arguments: Sequence[str],
        *,
        env: dict[str, str] | None = None,
        timeout_s: float = _TIMEOUT_S,
    ) -> str:
        """Run a command on it to its end, and return its output.

        Raises:
            MachinesError: its status is not 0.
        """
        done = subprocess.run(
            self.command(arguments),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            env={**_environment(), **self.clock, **(env or {})},
        )
        if done.returncode:
            raise MachinesError(f"{self.name}: {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def set_clock(self, ahead_s: int, folder: Path) -> None:
        """Set a wrong wall clock for processes that start later.

        Args:
            ahead_s: seconds that it is ahead.
            folder: folder for the library to preload.

        Raises:
            MachinesError: there is no C compiler, or it fails.
        """
        library = folder / "wrong_clock.so"
        self.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(_WRONG_CLOCK), "-ldl"])
        self.clock = {"LD_PRELOAD": str(library), "CLOCK_AHEAD_S": str(ahead_s)}

    def processes(self) -> list[int]:
        """Return the ids of its processes, without the holder of its namespaces."""
        namespace = os.readlink(f"/proc/{self.pid}/ns/net")
        pids = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != self.pid:
                try:
                    if os.readlink(entry / "ns" / "net") == namespace:
                        pids.append(int(entry.name))
                except OSError:
                    continue  # the process is gone
        return pids

    def kill(self) -> None:
        """Kill all of its processes at once, like a power failure.

        Raises:
            MachinesError: a process does not end.
        """
        deadline = time.monotonic() + _TIMEOUT_S
        while pids := [pid for pid in self.processes() if not _is_dead(pid)]:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise MachinesError(f"{self.name}: processes {pids} do not end")
            time.sleep(0.01)

    def close(self) -> None:
        """Kill its processes and remove its namespaces."""
        self.kill()
        self._holder.kill()
        self._holder.communicate()


class Machines:
    """Machines on one switch; a context manager.

    Args:
        names: host names.

    Raises:
        MachinesError: namespaces or links cannot be created on this machine.

    Attributes:
        machines: machines by name.
    """

    def __init__(self, *names: str) -> None:
        for program in ("ip", "nsenter", "setpriv", "unshare"):
            if shutil.which(program) is None:
                raise MachinesError(f"needs the program {program} (Debian: iproute2, util-linux)")
        self._stack = ExitStack()
        self.machines: dict[str, Machine] = {}
        try:
            self._switch = Machine(0, "switch")
            self._stack.callback(self._switch.close)
            self._switch.run(["ip", "link", "add", "switch", "type", "bridge"])
            self._switch.run(["ip", "link", "set", "switch", "up"])
            for number, name in enumerate(names, 1):
                machine = Machine(number, name)
                self._stack.callback(machine.close)
                self._connect(machine)
                self.machines[name] = machine
        except BaseException:  # the caller gets no machines that it could close
            self.close()
            raise

    def _connect(self, machine: Machine) -> None:
        port = f"to-{machine.name}"
        peer = ["peer", "name", "eth0", "netns", str(machine.pid)]
        self._switch.run(["ip", "link", "add", port, "type", "veth", *peer])
        self._switch.run(["ip", "link", "set", port, "master", "switch", "up"])
        machine.run(["ip", "address", "add", f"{machine.address}/24", "dev", "eth0"])
        machine.run(["ip", "link", "set", "eth0", "up"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __getitem__(self, name: str) -> Machine:
        return self.machines[name]

    def cut(self, name: str) -> None:
        """Disconnect a machine from the switch."""
        self._switch.run(["ip", "link", "set", f"to-{name}", "nomaster"])

    @contextmanager
    def without(self, name: str) -> Iterator[None]:
        """Disconnect a machine from the switch during the block."""
        self.cut(name)
        try:
            yield
        finally:
            self.restore(name)

    def restore(self, name: str) -> None:
        """Reconnect a machine to the switch."""
        self._switch.run(["ip", "link", "set", f"to-{name}", "master", "switch"])

    def close(self) -> None:
        """Close all machines."""
        self._stack.close()


def _environment() -> dict[str, str]:
    """Return the environment without proxies: gRPC would use one, and no machine reaches it."""
    return {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}


def _is_dead(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[0] == "Z"
    except OSError:
        return True
