"""Machines made of this one, with a link between them that can be cut.

A machine is a process that holds namespaces: a network with one interface, a /dev/shm, so that no
memory is shared by accident, and a host name. The link is a switch in a third network namespace.
Pulling a machine's cable out of the switch loses packets and nothing else: both ends still think
that they are connected, which is what a network that is gone looks like to TCP.

The namespaces end with the processes in them. Nothing of the host's network is changed. Needs root.
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
_PATIENCE_S = 30.0
_NAMESPACES = ("--net", "--mount", "--uts", "--ipc")
_WRONG_CLOCK = Path(__file__).with_name("wrong_clock.c")


class MachinesError(Exception):
    """Namespaces or links cannot be made here."""


class Machine:
    """One of them.

    Args:
        number: its address ends with it.
        name: its host name.

    Attributes:
        address: of its only interface but loopback.
        name: its host name.
        clock: environment variables of what is started on it, see `set_clock`.
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
            # With this process it ends too, however that ends.
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
            _, told = self._holder.communicate(timeout=_PATIENCE_S)
            raise MachinesError(f"no namespaces for machine {name}: {told.strip()}")

    @property
    def pid(self) -> int:
        """The process that holds its namespaces."""
        return self._holder.pid

    def command(self, arguments: Sequence[str]) -> list[str]:
        """What runs these on the machine."""
        enter = ["nsenter", *_NAMESPACES, "-t", str(self.pid)]
        return ["setpriv", "--pdeathsig", "KILL", "--", *enter, "--", *arguments]

    def start(
        self,
        arguments: Sequence[str],
        *,
        env: dict[str, str] | None = None,
        out: IO[str] | None = None,
    ) -> subprocess.Popen[str]:
        """Run a command on it, in a session of its own; it prints to ``out``, or to pipes."""
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
        timeout_s: float = _PATIENCE_S,
    ) -> str:
        """Run a command on it to its end; what it printed.

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
        """Have what is started on it from now on see a wall clock that is wrong.

        Args:
            ahead_s: seconds.
            folder: for the library that does it, which is preloaded.

        Raises:
            MachinesError: there is no C compiler, or it fails.
        """
        library = folder / "wrong_clock.so"
        self.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(_WRONG_CLOCK), "-ldl"])
        self.clock = {"LD_PRELOAD": str(library), "CLOCK_AHEAD_S": str(ahead_s)}

    def processes(self) -> list[int]:
        """All that run on it, but the one that holds it."""
        own = os.readlink(f"/proc/{self.pid}/ns/net")
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != self.pid:
                try:
                    if os.readlink(entry / "ns" / "net") == own:
                        found.append(int(entry.name))
                except OSError:
                    continue  # it has ended
        return found

    def kill(self) -> None:
        """End every process on it at once, as a machine that loses its power.

        Raises:
            MachinesError: one of them does not end.
        """
        until = time.monotonic() + _PATIENCE_S
        while pids := [pid for pid in self.processes() if not _is_over(pid)]:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > until:
                raise MachinesError(f"{self.name}: processes {pids} do not end")
            time.sleep(0.01)

    def close(self) -> None:
        """End it."""
        self.kill()
        self._holder.kill()
        self._holder.communicate()


class Machines:
    """Machines on one switch; a context manager.

    Args:
        names: host names.

    Raises:
        MachinesError: this machine does not let it make them.

    Attributes:
        machines: by name.
    """

    def __init__(self, *names: str) -> None:
        for program in ("ip", "nsenter", "setpriv", "unshare"):
            if shutil.which(program) is None:
                raise MachinesError(f"needs the program {program} of Debian's iproute2, util-linux")
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
        except BaseException:
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
        """Pull a machine's cable out of the switch."""
        self._switch.run(["ip", "link", "set", f"to-{name}", "nomaster"])

    @contextmanager
    def without(self, name: str) -> Iterator[None]:
        """`cut`, and at the end `restore`."""
        self.cut(name)
        try:
            yield
        finally:
            self.restore(name)

    def restore(self, name: str) -> None:
        """Put it back."""
        self._switch.run(["ip", "link", "set", f"to-{name}", "master", "switch"])

    def sent_bytes(self, name: str) -> int:
        """By a machine to the others so far, packet headers included."""
        return self._count(name, "rx_bytes")  # what the switch received from it

    def received_bytes(self, name: str) -> int:
        """By a machine from the others so far, packet headers included."""
        return self._count(name, "tx_bytes")

    def _count(self, name: str, counter: str) -> int:
        fields = self._switch.run(["cat", "/proc/net/dev"]).split(f"to-{name}:")[1].split()
        return int(fields[0 if counter == "rx_bytes" else 8])

    def close(self) -> None:
        """End all machines, and what runs on them."""
        self._stack.close()


def _environment() -> dict[str, str]:
    """Without proxies: no machine reaches one, and gRPC would look for the others behind it."""
    return {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}


def _is_over(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[0] == "Z"
    except OSError:
        return True
