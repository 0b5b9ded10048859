"""Run built images as docker/compose.yaml does, without a container engine, and print a report.

    python3 -m integration.try_images FOLDER [admin] [refit-server] [trainer] [cluster]

FOLDER has the root file system of each image: FOLDER/admin, FOLDER/refit-server, FOLDER/trainer;
docker/build makes them. Containers are made of namespaces (see integration/containers.py). They run
the Dockerfile's entry point, command and health check.

This needs root, Linux, util-linux, iproute2 and openssl; no engine and no network.
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


def report(subject: str, *results: object) -> None:
    """Print a line of the report."""
    print(f"  {subject}: {' '.join(map(str, results))}", flush=True)


def expect(condition: bool, message: str) -> None:
    """Raise `TryError` unless the condition holds."""
    if not condition:
        raise TryError(message)


def wait_for_line(run: Container, text: str, *, timeout_s: float = 500.0) -> None:
    """Wait until the log of a running container has ``text``."""
    deadline = time.monotonic() + timeout_s
    while text not in run.log:
        expect(run.running, f"it ended: {run.log}")
        expect(time.monotonic() < deadline, f"no {text!r} after {timeout_s:g} s: {run.log}")
        time.sleep(0.2)


def last_line(text: str) -> str:
    """Return the last line that has text, without the frame drawn around it."""
    lines = [line.strip("│╭╰─╮╯ ") for line in text.splitlines()]
    return [line for line in lines if line][-1]


def expect_refusal(subject: str, container: Container, *, expected: int = 1) -> None:
    """Run a container that must exit with status ``expected`` and without a traceback."""
    with container:
        status = container.wait()
        log = container.log
    expect(status == expected, f"{subject}: status {status}, expected {expected}: {log}")
    expect("Traceback" not in log, f"{subject}: {log}")
    report(subject, f"status {status}:", last_line(log))


def try_contents(image: Image) -> None:
    """Check that an image has no build tools, nothing world-writable and no set-user-id files."""
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
    report(
        "size",
        f"{size / 1e6:.0f} MB, including",
        ", ".join(f"{n} {s / 1e6:.0f}" for s, n in largest),
    )
    folders = ("usr/bin", "usr/sbin", "usr/local/bin", "opt/app/bin")
    tools = [
        f"{at}/{name}" for at in folders for name in UNWANTED if (image.root / at / name).exists()
    ]
    expect(not tools, f"the image has {tools}")
    report("build and download tools", "none")
    unsafe = [
        str(part.relative_to(image.root))
        for part in image.root.rglob("*")
        if part.is_file() and not part.is_symlink() and part.lstat().st_mode & 0o6002
    ]
    expect(not unsafe, f"writable by all, or with a set-user-id bit: {unsafe[:5]}")


def try_admin(root: Path, machines: Machines, secrets: Path) -> None:
    """Try the image of the admin service."""
    image, machine = Image.read(root), machines["one"]
    try_contents(image)
    secret = {"admin-token": secrets / "admin-token"}
    expect_refusal("without its token", Container(image, machine), expected=2)
    expect_refusal(
        "wrong arguments", Container(image, machine, ["serve", "--prot", "1"]), expected=2
    )
    with Container(image, machine, secrets=secret, data_size="8m") as admin:
        report("healthy after", f"{admin.wait_until_healthy():.1f} s")
        status, output = admin.execute(["touch", "/opt/app/written"])
        expect(status != 0 and "Read-only" in output, f"its root is writable: {output}")
        expect_refusal("port in use", Container(image, machine, secrets=secret))
        token = secret["admin-token"].read_text()
        for what, header, expected in (("no token", "", 401), ("its token", token, 200)):
            code = admin.execute([*_POST, header])[1].strip()
            expect(code == str(expected), f"OTLP with {what}: {code}")
        report("OTLP without and with its token", "401, 200")
        admin.execute(["dd", "if=/dev/zero", "of=/data/ballast", "bs=64k"])
        statuses = [admin.execute([*_POST, token])[1].strip() for _ in range(3)]
        expect(statuses[-1] == "503", f"a full disk is not reported: {statuses}: {admin.log}")
        begun = time.monotonic()
        while (unhealthy := admin.execute(image.health)[0]) == 0:
            expect(time.monotonic() < begun + 30, f"it stays healthy: {admin.log}")
            time.sleep(0.5)
        duration_s = time.monotonic() - begun
        report("disk full", f"OTLP 503; health check {unhealthy} after {duration_s:.1f} s")
        admin.execute(["rm", "/data/ballast"])
        begun = time.monotonic()
        deadline = begun + 60
        while admin.execute([*_POST, token])[1].strip() != "200":
            expect(time.monotonic() < deadline, f"it stays full: {admin.log}")
            time.sleep(0.5)
        report("disk free again", f"OTLP 200 after {time.monotonic() - begun:.1f} s")
        status, duration_s = admin.terminate()
        report("SIGTERM", f"status {status} after {duration_s:.1f} s")
        expect(status == 0 and duration_s < 15, admin.log)


# A program that sends a span and prints the status. It runs in the container, whose network is
# separate.
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
    "request = r.Request('http://127.0.0.1:8080/v1/traces', data.SerializeToString(), headers)\n"
    "try: print(r.urlopen(request, timeout=20).status)\n"
    "except e.HTTPError as error: print(error.code)\n",
]


def try_refit_server(root: Path, machines: Machines, secrets: Path) -> None:
    """Try the image of the refit server."""
    image, machine = Image.read(root), machines["one"]
    try_contents(image)
    names = ("refit-ca", "refit-cert", "refit-key", "refit-token")
    secret = {name: secrets / name for name in names}
    for missing in ("refit-cert", "refit-key", "refit-token"):
        others = {name: path for name, path in secret.items() if name != missing}
        expect_refusal(f"without {missing}", Container(image, machine, secrets=others), expected=2)
    expect_refusal(
        "all interfaces, neither TLS nor token",
        Container(image, machine, ["serve", "--address", "0.0.0.0:50051"]),
        expected=2,
    )
    with Container(image, machine, secrets=secret) as server:
        report("healthy after", f"{server.wait_until_healthy():.1f} s")
        begun = time.monotonic()
        server.execute(image.health)
        report("duration of a health check", f"{time.monotonic() - begun:.2f} s")
        status, output = server.execute(["refit-server", "check", "--timeout-s", "2"])
        expect(status == 1, "a check without TLS passes")
        report("a check without TLS", f"status {status}:", last_line(output))
        expect_refusal("port in use", Container(image, machine, secrets=secret))
        status, duration_s = server.terminate()
        report("SIGTERM", f"status {status} after {duration_s:.1f} s")
        expect(status == 0 and duration_s < 15, server.log)


def try_trainer(root: Path, machines: Machines, secrets: Path) -> None:
    """Try the image of the trainer: a run that starts its own Ray."""
    image, machine = Image.read(root), machines["one"]
    try_contents(image)
    expect_refusal("an unknown command", Container(image, machine, ["trian"]), expected=127)
    expect_refusal(
        "an unknown key",
        Container(image, machine, ["grpo-trainer", "train", "--set", "grpo.stpes=1"]),
        expected=2,
    )
    expect_refusal("an unknown role", Container(image, machine, ["ray-node", "boss"]))
    expect_refusal("no head", Container(image, machine, ["ray-node", "worker"]))
    short = [*image.command, "--set", "grpo.num_steps=2", "--set", "validation.every_steps=0"]
    with Container(image, machine, short, data_size="256m", shm="1g") as run:
        status = run.wait(timeout_s=400)
        expect(status == 0, f"a run ended with {status}: {run.log}")
        report(
            "two steps of the demo", f"status {status} after {time.monotonic() - run.begun:.0f} s"
        )
    with Container(image, machine, image.command, data_size="256m", shm="1g") as run:
        report("healthy after", f"{run.wait_until_healthy():.1f} s")
        wait_for_line(run, "step    1")
        status, duration_s = run.terminate()
        report("SIGTERM", f"status {status} after {duration_s:.1f} s")
        expect(status == 0 and duration_s < 30 and "stopped after step" in run.log, run.log)


def listeners(machine: Machine) -> str:
    """Return a machine's listening programs: on every address, on its own, and on loopback."""
    programs: dict[str, Counter[str]] = {
        "every": Counter(),
        machine.address: Counter(),
        "loopback": Counter(),
    }
    for line in machine.run(["ss", "-Hltnp"]).splitlines():
        host = line.split()[3].rpartition(":")[0].strip("[]").removeprefix("::ffff:")
        program = re.search(r'\(\("([^"]*)"', line)
        where = "every" if host in ("0.0.0.0", "*", "::") else host
        where = "loopback" if where in ("127.0.0.1", "::1") else where
        programs[where][program.group(1) if program else "?"] += 1
    return "; ".join(
        f"{where}: {', '.join(f'{name} {count}' for name, count in sorted(names.items()))}"
        for where, names in programs.items()
    )


def try_cluster(roots: Path, machines: Machines, secrets: Path) -> None:
    """Try the services of compose.yaml whose images are built here.

    There is no collector: the run sends its traces to the admin service.
    """
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

    def limits(resources: str) -> list[str]:
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
        head = stack.enter_context(node("ray-head", "head", *limits('{"generators": 1}')))
        report("head healthy after", f"{head.wait_until_healthy():.1f} s")
        wrong = {"ray-token": secrets / "refit-token"}
        expect_refusal("a node with another token", node("trainer", "worker", secrets=wrong))
        expect_refusal("a node without a token", node("trainer", "worker", secrets={}))
        worker = stack.enter_context(node("ray-worker", "worker", *limits('{"trainers": 1}')))
        report("worker healthy after", f"{worker.wait_until_healthy():.1f} s")
        admin.wait_until_healthy()
        refit.wait_until_healthy()
        run = stack.enter_context(
            node(
                "trainer",
                *("driver", "grpo-trainer", "train", "--config", "/run/files/trainer.yaml"),
                *("--set", "grpo.num_steps=3", "--set", "tracing.endpoint=http://admin:8080"),
                files={"trainer.yaml": DOCKER / "trainer.yaml"},
            )
        )
        wait_for_line(run, "step    2")
        for name in ("ray-head", "ray-worker", "trainer"):
            report(f"{name} listens", listeners(machines[name]))
        status = run.wait(timeout_s=500)
        expect(status == 0, f"the run ended with {status}: {run.log}")
        report("three steps", f"status {status} after {time.monotonic() - run.begun:.0f} s")
        query = ["dataplane-admin", "traces", "--token-file", "/run/secrets/admin-token", "--json"]
        answer = json.loads(admin.execute(query)[1])
        steps = [trace for trace in answer["traces"] if trace["name"] == "grpo.step"]
        expect(len(steps) == 3, f"expected three traces of steps: {answer}")
        report("the admin service has", len(steps), "steps of", steps[0]["spans"], "spans")
        for name, container in (("ray-worker", worker), ("ray-head", head)):
            status, duration_s = container.terminate()
            report(f"SIGTERM to {name}", f"status {status} after {duration_s:.1f} s")
            expect(status == 0 and duration_s < 30, container.log)
        for name, container in (("refit-server", refit), ("admin", admin)):
            status, duration_s = container.terminate()
            report(f"SIGTERM to {name}", f"status {status} after {duration_s:.1f} s")
            expect(status == 0 and duration_s < 15, container.log)


@contextmanager
def secrets_folder() -> Iterator[Path]:
    """Yield a folder of new secrets, made by docker/secrets."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([DOCKER / "secrets", folder], check=True, stdout=subprocess.DEVNULL)
        yield Path(folder)


def main(arguments: Sequence[str]) -> int:
    """Try the named images, or all; return the exit status."""
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
