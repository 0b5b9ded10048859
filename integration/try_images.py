"""Runs built images without a container engine, as docker/compose.yaml runs them, and tells.

    python3 -m integration.try_images FOLDER [admin] [refit-server] [trainer] [cluster]

FOLDER has the root file system of each image: FOLDER/admin, FOLDER/refit-server, FOLDER/trainer;
docker/build makes them. A container is made of namespaces here: processes, network, mounts and a
host name of its own, a read-only root, tmpfs on /tmp, user 10001 without any capability or a way to
get one. What is run is what the Dockerfile says: its entry point, its command, its health check.

Needs root, Linux, util-linux, iproute2 and openssl; no engine, no network.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from integration.cluster.machines import Machine, Machines
from integration.containers import DOCKER, Container, Image, TryError

UNWANTED = ("cc", "gcc", "g++", "make", "ld", "pip", "pip3", "uv", "git", "curl", "wget")


def tell(what: str, *results: object) -> None:
    """A line of the report."""
    print(f"  {what}: {' '.join(str(one) for one in results)}", flush=True)


def expect(holds: bool, what: str) -> None:
    """Raise unless it holds."""
    if not holds:
        raise TryError(what)


def last_line(text: str) -> str:
    """What a refusal says, without the frames that are drawn around it."""
    told = [line.strip("│╭╰─╮╯ ") for line in text.splitlines()]
    return [line for line in told if line][-1]


def refused(what: str, container: Container, *, status: int = 1) -> None:
    """It has to end by itself, with one line that says why."""
    with container:
        found = container.ended()
        told = container.log
    expect(found == status, f"{what}: status {found}, expected {status}: {told}")
    expect("Traceback" not in told, f"{what}: {told}")
    tell(what, f"status {found}:", last_line(told))


def try_contents(image: Image) -> None:
    """No tools to build with, nothing writable, nothing with the rights of another."""
    size = sum(part.lstat().st_size for part in image.root.rglob("*") if not part.is_dir())
    packages = image.root / "opt/app/lib/python3.11/site-packages"
    largest = sorted(
        (
            (sum(f.lstat().st_size for f in part.rglob("*") if f.is_file()), part.name)
            for part in packages.iterdir()
            if part.is_dir()
        ),
        reverse=True,
    )[:6]
    tell("size", f"{size / 1e6:.0f} MB, of it", ", ".join(f"{n} {s / 1e6:.0f}" for s, n in largest))
    folders = ("usr/bin", "usr/sbin", "usr/local/bin", "opt/app/bin")
    found = [
        f"{at}/{name}" for at in folders for name in UNWANTED if (image.root / at / name).exists()
    ]
    expect(not found, f"found {found}")
    tell("tools to build or fetch with", "none")
    raised = [
        str(part.relative_to(image.root))
        for part in image.root.rglob("*")
        if part.is_file() and not part.is_symlink() and part.lstat().st_mode & 0o6002
    ]
    expect(not raised, f"writable by all, or with a set-user-id bit: {raised[:5]}")


def try_admin(root: Path, machines: Machines, secrets: Path) -> None:
    """The admin service."""
    image, machine = Image.read(root), machines["one"]
    try_contents(image)
    secret = {"admin-token": secrets / "admin-token"}
    refused("without its token", Container(image, machine))
    refused("wrong arguments", Container(image, machine, ["serve", "--prot", "1"]), status=2)
    with Container(image, machine, secrets=secret, data_size="8m") as admin:
        tell("healthy after", f"{admin.healthy():.1f} s")
        status, told = admin.execute(["touch", "/opt/app/written"])
        expect(status != 0 and "Read-only" in told, f"its root can be written: {told}")
        refused("port in use", Container(image, machine, secrets=secret))
        token = secret["admin-token"].read_text()
        for what, header, expected in (("no token", "", 401), ("its token", token, 200)):
            code = admin.execute([*_POST, header])[1].strip()
            expect(code == str(expected), f"OTLP with {what}: {code}")
        tell("OTLP without its token, with it", "401, 200")
        admin.execute(["dd", "if=/dev/zero", "of=/data/ballast", "bs=64k"])
        statuses = [admin.execute([*_POST, token])[1].strip() for _ in range(3)]
        expect(statuses[-1] == "503", f"a full disk is not told: {statuses}: {admin.log}")
        begun = time.monotonic()
        while (unhealthy := admin.execute(image.health)[0]) == 0:
            expect(time.monotonic() < begun + 30, f"it stays healthy: {admin.log}")
            time.sleep(0.5)
        took = time.monotonic() - begun
        tell("disk full", f"OTLP 503; health check {unhealthy} after {took:.1f} s")
        admin.execute(["rm", "/data/ballast"])
        begun = time.monotonic()
        until = begun + 60
        while admin.execute([*_POST, token])[1].strip() != "200":
            expect(time.monotonic() < until, f"it stays full: {admin.log}")
            time.sleep(0.5)
        tell("room again", f"OTLP 200 after {time.monotonic() - begun:.1f} s")
        status, took = admin.terminate()
        tell("SIGTERM", f"status {status} after {took:.1f} s")
        expect(status == 0 and took < 15, admin.log)


# Sends a span; prints the status. Inside of the image, since the container's network is its own.
_POST = [
    "python3",
    "-c",
    "import sys, time, urllib.request as r, urllib.error as e\n"
    "from opentelemetry.proto.trace.v1.trace_pb2 import TracesData\n"
    "import os\n"
    "data = TracesData()\n"
    "span = data.resource_spans.add().scope_spans.add().spans.add()\n"
    "span.trace_id, span.span_id, span.name = os.urandom(16), os.urandom(8), 'tried'\n"
    "span.start_time_unix_nano = time.time_ns() - 1000\n"
    "span.end_time_unix_nano = time.time_ns()\n"
    "headers = {'content-type': 'application/x-protobuf'}\n"
    "if sys.argv[1]: headers['authorization'] = 'Bearer ' + sys.argv[1]\n"
    "asked = r.Request('http://127.0.0.1:8080/v1/traces', data.SerializeToString(), headers)\n"
    "try: print(r.urlopen(asked, timeout=20).status)\n"
    "except e.HTTPError as error: print(error.code)\n",
]


def try_refit_server(root: Path, machines: Machines, secrets: Path) -> None:
    """The refit server."""
    image, machine = Image.read(root), machines["one"]
    try_contents(image)
    names = ("refit-ca", "refit-cert", "refit-key", "refit-token")
    secret = {name: secrets / name for name in names}
    for missing in ("refit-cert", "refit-key", "refit-token"):
        others = {name: path for name, path in secret.items() if name != missing}
        refused(f"without {missing}", Container(image, machine, secrets=others))
    refused(
        "all interfaces, neither TLS nor token",
        Container(image, machine, ["serve", "--address", "0.0.0.0:50051"]),
    )
    with Container(image, machine, secrets=secret) as server:
        tell("healthy after", f"{server.healthy():.1f} s")
        begun = time.monotonic()
        server.execute(image.health)
        tell("a health check takes", f"{time.monotonic() - begun:.2f} s")
        status, told = server.execute(["refit-server", "check", "--timeout-s", "2"])
        expect(status == 1, "a check without TLS passes")
        tell("a check without TLS", f"status {status}:", last_line(told))
        refused("port in use", Container(image, machine, secrets=secret))
        status, took = server.terminate()
        tell("SIGTERM", f"status {status} after {took:.1f} s")
        expect(status == 0 and took < 15, server.log)


def try_trainer(root: Path, machines: Machines, secrets: Path) -> None:
    """A run with a Ray of its own."""
    image, machine = Image.read(root), machines["one"]
    try_contents(image)
    refused("a command that is none", Container(image, machine, ["trian"]), status=127)
    refused(
        "an unknown key",
        Container(image, machine, ["grpo-trainer", "train", "--set", "grpo.stpes=1"]),
    )
    refused("a role that is none", Container(image, machine, ["ray-node", "boss"]))
    refused("no head", Container(image, machine, ["ray-node", "worker"]))
    short = [*image.command, "--set", "grpo.num_steps=2", "--set", "validation.every_steps=0"]
    with Container(image, machine, short, data_size="256m", shm="1g") as run:
        status = run.ended(patience_s=400)
        expect(status == 0, f"a run ended with {status}: {run.log}")
        tell("two steps of the demo", f"status {status} after {time.monotonic() - run.begun:.0f} s")
    with Container(image, machine, image.command, data_size="256m", shm="1g") as run:
        tell("healthy after", f"{run.healthy():.1f} s")
        while "step    1" not in run.log:
            expect(run.running, f"it ended: {run.log}")
            time.sleep(0.2)
        status, took = run.terminate()
        tell("SIGTERM", f"status {status} after {took:.1f} s")
        expect(status == 0 and took < 30 and "stopped after step" in run.log, run.log)


def listeners(machine: Machine) -> str:
    """What of a machine listens on every address, on its own one, on loopback: by program."""
    found: dict[str, Counter[str]] = {
        "every": Counter(),
        machine.address: Counter(),
        "loopback": Counter(),
    }
    for line in machine.run(["ss", "-Hltnp"]).splitlines():
        host = line.split()[3].rpartition(":")[0].strip("[]").removeprefix("::ffff:")
        program = re.search(r'\(\("([^"]*)"', line)
        where = "every" if host in ("0.0.0.0", "*", "::") else host
        where = "loopback" if where in ("127.0.0.1", "::1") else where
        found[where][program.group(1) if program else "?"] += 1
    return "; ".join(
        f"{where}: {', '.join(f'{name} {count}' for name, count in sorted(names.items()))}"
        for where, names in found.items()
    )


def try_cluster(roots: Path, machines: Machines, secrets: Path) -> None:
    """What compose.yaml starts, but for images of others: traces go to the admin service."""
    trainer = Image.read(roots / "trainer")
    node_secrets = {name: secrets / name for name in ("ray-token", "refit-ca", "refit-token")}
    hosts = {name: machine.address for name, machine in machines.machines.items()}
    hosts["head.cluster"] = hosts["ray-head"]
    token = (secrets / "admin-token").read_text()
    environment = {
        "RAY_HEAD": "head.cluster:6379",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": "/run/secrets/ray-token",
        "OTEL_EXPORTER_OTLP_HEADERS": f"Authorization=Bearer%20{token}",
    }

    def node(name: str, *command: str, **others: object) -> Container:
        return Container(
            trainer,
            machines[name],
            ["ray-node", *command],
            data=data,
            hosts=hosts,
            shm="512m",
            **{"secrets": node_secrets, "environment": environment, **others},  # type: ignore[arg-type]
        )

    def offers(resources: str) -> list[str]:
        return ["--num-cpus=4", "--object-store-memory=268435456", f"--resources={resources}"]

    with ExitStack() as stack:
        data = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        os.chown(data, 10001, 10001)
        admin = stack.enter_context(
            Container(
                Image.read(roots / "admin"),
                machines["admin"],
                [
                    *("serve", "--host=0.0.0.0", "--token-file=/run/secrets/admin-token"),
                    "--allowed-host=admin",
                ],
                secrets={"admin-token": secrets / "admin-token"},
                hosts=hosts,
            )
        )
        refit = stack.enter_context(
            Container(
                Image.read(roots / "refit-server"),
                machines["refit-server"],
                secrets={
                    name: secrets / name
                    for name in ("refit-ca", "refit-cert", "refit-key", "refit-token")
                },
                hosts=hosts,
            )
        )
        head = stack.enter_context(node("ray-head", "head", *offers('{"generators": 1}')))
        tell("head healthy after", f"{head.healthy():.1f} s")
        wrong = {"ray-token": secrets / "refit-token"}
        refused("a node with another token", node("trainer", "worker", secrets=wrong))
        refused("a node without a token", node("trainer", "worker", secrets={}))
        worker = stack.enter_context(node("ray-worker", "worker", *offers('{"trainers": 1}')))
        tell("worker healthy after", f"{worker.healthy():.1f} s")
        admin.healthy(), refit.healthy()
        run = stack.enter_context(
            node(
                "trainer",
                *("driver", "grpo-trainer", "train", "--config", "/run/files/trainer.yaml"),
                *("--set", "grpo.num_steps=3", "--set", "tracing.endpoint=http://admin:8080"),
                files={"trainer.yaml": DOCKER / "trainer.yaml"},
            )
        )
        while "step    2" not in run.log:
            expect(run.running, f"it ended: {run.log}")
            time.sleep(0.2)
        for name in ("ray-head", "ray-worker", "trainer"):
            tell(f"{name} listens", listeners(machines[name]))
        status = run.ended(patience_s=500)
        expect(status == 0, f"the run ended with {status}: {run.log}")
        tell("three steps", f"status {status} after {time.monotonic() - run.begun:.0f} s")
        asked = ["dataplane-admin", "traces", "--token-file", "/run/secrets/admin-token", "--json"]
        found = json.loads(admin.execute(asked)[1])
        steps = [one for one in found["traces"] if one["name"] == "grpo.step"]
        expect(len(steps) == 3, f"expected three traces of steps: {found}")
        tell("the admin service has", len(steps), "steps of", steps[0]["spans"], "spans")
        for name, container in (("ray-worker", worker), ("ray-head", head)):
            status, took = container.terminate()
            tell(f"SIGTERM to {name}", f"status {status} after {took:.1f} s")
            expect(status == 0 and took < 30, container.log)
        for name, container in (("refit-server", refit), ("admin", admin)):
            status, took = container.terminate()
            tell(f"SIGTERM to {name}", f"status {status} after {took:.1f} s")
            expect(status == 0 and took < 15, container.log)


@contextmanager
def secrets_folder() -> Iterator[Path]:
    """Secrets that docker/secrets made."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([DOCKER / "secrets", folder], check=True, stdout=subprocess.DEVNULL)
        yield Path(folder)


def main(arguments: Sequence[str]) -> int:
    """Try what is named; the exit status."""
    if not arguments or arguments[0].startswith("-"):
        print(__doc__)
        return 2
    roots = Path(arguments[0]).resolve()
    single = {"admin": try_admin, "refit-server": try_refit_server, "trainer": try_trainer}
    failed = False
    for name in arguments[1:] or [*single, "cluster"]:
        print(name, flush=True)
        names = ("ray-head", "ray-worker", "trainer", "refit-server", "admin")
        try:
            with (
                secrets_folder() as secrets,
                Machines(*(names if name == "cluster" else ("one",))) as machines,
            ):
                if name == "cluster":
                    try_cluster(roots, machines, secrets)
                else:
                    single[name](roots / name, machines, secrets)
        except TryError as error:
            failed = True
            print(f"  FAILED: {error}", flush=True)
    return int(failed)


if __name__ == "__main__":
    for program in ("unshare", "nsenter", "ip", "openssl"):
        if shutil.which(program) is None:
            sys.exit(f"needs the program {program}")
    sys.exit(main(sys.argv[1:]))
