"""Containers made of namespaces, from an image's root file system and what its Dockerfile says.

Processes, network, mounts and a host name of its own, a read-only root, tmpfs on /tmp, user 10001
without any capability or a way to get one. Needs root, Linux and util-linux; no engine.
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
PATIENCE_S = 180.0
_DEVICES = ("null", "zero", "full", "random", "urandom")


class TryError(Exception):
    """What was expected did not happen."""


@dataclass(frozen=True)
class Image:
    """What the last stage of a Dockerfile says."""

    root: Path
    entrypoint: list[str]
    command: list[str]
    health: list[str]
    environment: dict[str, str]

    @classmethod
    def read(cls, root: Path) -> Image:
        """Of the root file system in a folder that is named as the Dockerfile's."""
        text = (DOCKER / root.name / "Dockerfile").read_text().replace("\\\n", " ")
        last = re.split(r"^FROM ", text, flags=re.M)[-1]
        environment = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
        for line in re.findall(r"^ENV (.*)$", last, re.M):
            for pair in shlex.split(line):
                name, _, value = pair.partition("=")
                environment[name] = value.replace("$PATH", environment["PATH"])

        def words(pattern: str) -> list[str]:
            found = re.search(pattern, last, re.M)
            assert found is not None
            read: list[str] = json.loads(found.group(1))
            return read

        return cls(
            root=root,
            entrypoint=words(r"^ENTRYPOINT (\[.*\])"),
            command=words(r"^CMD (\[.*\])"),
            health=words(r"^HEALTHCHECK .*CMD (\[.*\])"),
            environment={**environment, "HOME": "/data"},
        )


@dataclass
class Container:
    """A process of an image; a context manager.

    Args:
        image: what is run.
        machine: whose network it has.
        command: instead of the image's.
        data: what is mounted at /data; None for a tmpfs of ``data_size``.
        secrets: files of /run/secrets, by name.
        files: further files, by their path inside.
        environment: beside the image's.
        hosts: addresses by name.
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
        own = {"localhost": "127.0.0.1", self.machine.name: self.machine.address}
        hosts = own | self.hosts
        told = "".join(f"{address} {name}\n" for name, address in hosts.items())
        lines = [
            "mount --make-rprivate /",
            f"mount --bind {root} {root}",
            f"cd {root}",
            "[ -e etc/hosts ] || touch etc/hosts",  # engines make it, images may lack it
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
            f"printf %s {shlex.quote(told)} > run/hosts",
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
        """Of its first process, as seen from outside."""
        until = time.monotonic() + PATIENCE_S
        # nsenter becomes unshare, whose only child is the container.
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        while time.monotonic() < until:
            found = children.read_text().split() if self._process.poll() is None else []
            if found:
                return int(found[0])
            time.sleep(0.02)
        raise TryError(f"it did not start: {self.log}")

    @property
    def log(self) -> str:
        """What it wrote so far."""
        self._log.flush()
        return Path(f"/proc/self/fd/{self._log.fileno()}").read_text()

    def execute(self, command: Sequence[str], *, patience_s: float = 60) -> tuple[int, str]:
        """Run a command in it, as engines do for health checks; its status and what it wrote."""
        namespaces = ["--mount", "--pid", "--net", "--ipc", "--uts"]
        done = subprocess.run(
            ["nsenter", *namespaces, "-t", str(self.pid), *self._inside(command)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=patience_s,
            check=False,
        )
        return done.returncode, done.stdout

    def healthy(self) -> float:
        """Wait until its health check passes; seconds since its start."""
        until = time.monotonic() + PATIENCE_S
        while True:
            if self._process.poll() is not None:
                raise TryError(f"it ended with {self._process.returncode}: {self.log}")
            status, told = self.execute(self.image.health)
            if status == 0:
                return time.monotonic() - self.begun
            if time.monotonic() > until:
                raise TryError(f"health check: {status}: {told}\n{self.log}")
            time.sleep(0.2)

    @property
    def running(self) -> bool:
        """Whether it goes on."""
        return self._process.poll() is None

    def ended(self, *, patience_s: float = PATIENCE_S) -> int:
        """Wait for its end; its exit status."""
        try:
            return self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            raise TryError(f"it goes on after {patience_s:g} s: {self.log}") from None

    def terminate(self) -> tuple[int, float]:
        """SIGTERM to its first process; exit status, and seconds until then."""
        begun = time.monotonic()
        os.kill(self.pid, signal.SIGTERM)
        return self.ended(), time.monotonic() - begun
