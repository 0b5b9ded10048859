"""Containers made of Linux namespaces, from an image's root file system and its Dockerfile.

A container has separate processes, network, mounts and host name, a read-only root and a tmpfs on
/tmp. It runs as user 10001 without capabilities and cannot gain any. This needs root, Linux and
util-linux, and no container engine.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from integration.cluster.machines import Machine

DOCKER = Path(__file__).resolve().parents[1] / "docker"
TIMEOUT_S = 180.0
_DEVICES = ("null", "zero", "full", "random", "urandom")


class TryError(Exception):
    """Container that did not behave as expected."""


@dataclass(frozen=True)
class Image:
    """A root file system and the settings in the last stage of its Dockerfile."""

    root: Path
    entrypoint: list[str]
    command: list[str]
    health: list[str]
    environment: dict[str, str]

    @classmethod
    def read(cls, root: Path) -> Image:
        """Read docker/NAME/Dockerfile, where NAME is the name of the folder ``root``."""
        text = (DOCKER / root.name / "Dockerfile").read_text().replace("\\\n", " ")
        last = re.split(r"^FROM ", text, flags=re.M)[-1]
        environment = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
        for line in re.findall(r"^ENV (.*)$", last, re.M):
            for pair in shlex.split(line):
                name, _, value = pair.partition("=")
                environment[name] = value.replace("$PATH", environment["PATH"])

        def words(pattern: str) -> list[str]:
            match = re.search(pattern, last, re.M)
            assert match is not None
            parsed: list[str] = json.loads(match.group(1))
            return parsed

        return cls(
            root=root,
            entrypoint=words(r"^ENTRYPOINT (\[.*\])"),
            command=words(r"^CMD (\[.*\])"),
            health=words(r"^HEALTHCHECK .*CMD (\[.*\])"),
            environment={**environment, "HOME": "/data"},
        )


@dataclass
class Container:
    """A running container of an image; a context manager.

    Args:
        image: the image to run.
        machine: the machine whose network namespace it uses.
        command: replaces the image's command.
        data: the folder mounted at /data; None for a tmpfs of ``data_size``.
        secrets: files of /run/secrets, by name.
        files: files of /run/files, by name.
        environment: variables added to the image's.
        hosts: addresses by host name.
        shm: size of /dev/shm.
    """

    image: Image
    machine: Machine
    command: Sequence[str] | None = None
    data: Path | None = None
    data_size: str = "64m"
    secrets: dict[str, Path] = field(default_factory=dict)
    files: dict[str, Path] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    hosts: dict[str, str] = field(default_factory=dict)
    shm: str = "64m"

    def __enter__(self) -> Self:
        self._log = tempfile.TemporaryFile("w+")  # closed by __exit__
        self.begun = time.monotonic()
        arguments = self.image.command if self.command is None else self.command
        inner = [*self.image.entrypoint, *arguments]
        alone = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-euc"]
        self._process = subprocess.Popen(
            self.machine.command([*alone, self._setup(inner)]),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )
        return self

    def __exit__(self, *error: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._log.close()

    def _setup(self, inner: Sequence[str]) -> str:
        root = shlex.quote(str(self.image.root))
        local = {"localhost": "127.0.0.1", self.machine.name: self.machine.address}
        hosts = local | self.hosts
        hosts_file = "".join(f"{address} {name}\n" for name, address in hosts.items())
        lines = [
            "mount --make-rprivate /",
            f"mount --bind {root} {root}",
            f"cd {root}",
            "[ -e etc/hosts ] || touch etc/hosts",  # engines create it, images may lack it
            "mount -o remount,bind,ro .",
            f"cd {root}",
            "mount -t proc proc proc",
            "mount -t sysfs -o ro sysfs sys",  # UCX looks for interfaces there
            "mount -t tmpfs -o size=64k,mode=755 tmpfs dev",
            *(f"touch dev/{name} && mount --bind /dev/{name} dev/{name}" for name in _DEVICES),
            f"mkdir dev/shm && mount -t tmpfs -o size={self.shm},mode=1777 tmpfs dev/shm",
            "ln -s /proc/self/fd dev/fd",
            "mount -t tmpfs -o size=1g,mode=1777 tmpfs tmp",
            "mount -t tmpfs -o size=1m,mode=755 tmpfs run",
            "mkdir run/secrets run/files",
            *(
                f"touch run/{at} && mount --bind {shlex.quote(str(path))} run/{at}"
                for folder, files in (("secrets", self.secrets), ("files", self.files))
                for at, path in ((f"{folder}/{name}", path) for name, path in files.items())
            ),
            f"printf %s {shlex.quote(hosts_file)} > run/hosts",
            "mount --bind run/hosts etc/hosts",
            f"mount --bind {shlex.quote(str(self.data))} data"
            if self.data is not None
            else f"mount -t tmpfs -o size={self.data_size},uid=10001,gid=10001 tmpfs data",
            "mount -o remount,ro run",
            f"exec {shlex.join(self._inside(inner))}",
        ]
        return "\n".join(lines)

    def _inside(self, inner: Sequence[str]) -> list[str]:
        limits = ["--reuid", "10001", "--regid", "10001", "--clear-groups", "--no-new-privs"]
        variables = {**self.image.environment, **self.environment}
        return [
            *("chroot", str(self.image.root)),
            *("/usr/bin/setpriv", *limits, "--bounding-set=-all", "--inh-caps=-all"),
            *("/usr/bin/env", "-i", "--chdir=/data"),
            *(f"{name}={value}" for name, value in variables.items()),
            *inner,
        ]

    @property
    def pid(self) -> int:
        """Id of its first process, as seen from outside.

        Raises:
            TryError: it did not start in time.
        """
        deadline = time.monotonic() + TIMEOUT_S
        # nsenter becomes unshare, whose only child is the container.
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        while time.monotonic() < deadline:
            pids = children.read_text().split() if self._process.poll() is None else []
            if pids:
                return int(pids[0])
            time.sleep(0.02)
        raise TryError(f"it did not start: {self.log}")

    @property
    def log(self) -> str:
        """Output so far."""
        self._log.flush()
        return Path(f"/proc/self/fd/{self._log.fileno()}").read_text()

    def execute(self, command: Sequence[str], *, timeout_s: float = 60) -> tuple[int, str]:
        """Run a command in the container, as engines run health checks.

        Returns:
            Exit status and output.
        """
        namespaces = ["--mount", "--pid", "--net", "--ipc", "--uts"]
        done = subprocess.run(
            ["nsenter", *namespaces, "-t", str(self.pid), *self._inside(command)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        return done.returncode, done.stdout

    def wait_until_healthy(self) -> float:
        """Wait until the health check passes; return the seconds since the start."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            if self._process.poll() is not None:
                raise TryError(f"it ended with {self._process.returncode}: {self.log}")
            status, output = self.execute(self.image.health)
            if status == 0:
                return time.monotonic() - self.begun
            if time.monotonic() > deadline:
                raise TryError(f"health check failed with {status}: {output}\n{self.log}")
            time.sleep(0.2)

    @property
    def running(self) -> bool:
        """True while its first process runs."""
        return self._process.poll() is None

    def wait(self, *, timeout_s: float = TIMEOUT_S) -> int:
        """Wait for its end; return the exit status."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TryError(f"still running after {timeout_s:g} s: {self.log}") from None

    def terminate(self) -> tuple[int, float]:
        """Send SIGTERM to its first process; return the exit status and the seconds it took."""
        begun = time.monotonic()
        os.kill(self.pid, signal.SIGTERM)
        return self.wait(), time.monotonic() - begun
