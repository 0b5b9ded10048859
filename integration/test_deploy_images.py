"""Dockerfiles, compose files and the workflow of images: linted, valid, closed, consistent."""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import ssl
import stat
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from check_jsonschema import builtin_schemas
from integration.cluster.machines import Machine
from integration.containers import Container, Image

from dataplane_admin.cli import serve as serve_admin
from grpo_trainer import load_config
from refit_server.cli import serve as serve_refit

ROOT = Path(__file__).parents[1]
DOCKER = ROOT / "docker"
DOCKERFILES = sorted(DOCKER.glob("*/Dockerfile"))
COMPOSE = [
    DOCKER / "compose.yaml",
    DOCKER / "monitoring" / "compose.yaml",
    DOCKER / "observability" / "compose.yaml",
]
HARDENED = COMPOSE[:2]
ADMIN_PORT = int(inspect.signature(serve_admin).parameters["port"].default)
REFIT_PORT = int(inspect.signature(serve_refit).parameters["address"].default.rpartition(":")[2])
METRICS_PORT = 9464  # OTEL_EXPORTER_PROMETHEUS_PORT's default, also in docs/refit-server.md
NODES = {"ray-head", "ray-worker", "trainer"}


def load(path: Path) -> dict[str, Any]:
    read = yaml.safe_load(path.read_text())
    assert isinstance(read, dict)
    return read


def schema(name: str) -> dict[str, Any]:
    folder = Path(builtin_schemas.__file__ or "").parent / "vendor"
    read: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return read


def services(*paths: Path) -> list[Any]:
    return [
        pytest.param(path, name, service, id=f"{path.parent.name}-{name}")
        for path in paths
        for name, service in load(path)["services"].items()
    ]


def last_stage(dockerfile: Path) -> str:
    return re.split(r"^FROM ", dockerfile.read_text(), flags=re.MULTILINE)[-1]


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.parent.name)
def test_hadolint_finds_nothing(dockerfile: Path) -> None:
    hadolint = Path(sysconfig.get_path("scripts")) / "hadolint"
    done = subprocess.run([hadolint, dockerfile], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.parent.name)
def test_an_image_runs_as_nobody_special_and_says_whether_it_is_well(dockerfile: Path) -> None:
    stage = last_stage(dockerfile)
    assert re.search(r"^USER 10001:10001$", stage, re.MULTILINE)
    assert re.search(r"^HEALTHCHECK .*\\\n +CMD \[", stage, re.MULTILINE)
    assert re.search(r"^ENTRYPOINT \[", stage, re.MULTILINE)
    assert "STOPSIGNAL SIGTERM" in stage
    assert "VOLUME /data" in stage


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.parent.name)
def test_what_builds_does_not_reach_the_image(dockerfile: Path) -> None:
    stage = last_stage(dockerfile)
    assert stage.startswith("python\n")
    assert "apt-get" not in stage
    assert next(line for line in stage.splitlines() if line.startswith("COPY")) == (
        "COPY --from=build /opt/app /opt/app"
    )
    [base] = re.findall(
        r"^FROM \$\{DEBIAN\} AS python\n(?:.*\n)*?(?=^FROM)", dockerfile.read_text(), re.M
    )
    for tool in ("python3-venv", "pip", "gcc", "build-essential", "curl", "git"):
        assert tool not in base


def test_what_an_image_is_made_of_is_not_ignored() -> None:
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line[0] == "!"}
    for dockerfile in DOCKERFILES:
        for source in re.findall(r"^COPY (docker/\S+) ", dockerfile.read_text(), re.MULTILINE):
            assert source in let_in
    for name in let_in:
        assert (ROOT / name).exists()


@pytest.mark.parametrize("path", COMPOSE, ids=lambda path: path.parent.name)
def test_a_compose_file_is_valid_and_names_what_is_there(path: Path) -> None:
    told = load(path)
    jsonschema.validate(told, schema("compose-spec"))
    named = [one["file"] for one in told.get("configs", {}).values() if "file" in one]
    for service in told["services"].values():
        named += [each.split(":")[0] for each in service.get("volumes", []) if each[0] == "."]
        if "build" in service:
            context = (path.parent / service["build"]["context"]).resolve()
            assert (context / service["build"]["dockerfile"]).is_file()
    for name in named:
        assert (path.parent / name).exists(), name


@pytest.mark.parametrize(("path", "name", "service"), services(*COMPOSE))
def test_images_have_versions(path: Path, name: str, service: dict[str, Any]) -> None:
    image, _, tag = service["image"].rpartition(":")
    assert image
    assert re.fullmatch(r"v?\d+\.\d+\.\d+", tag), service["image"]
    if image.startswith("rl-dataplane/"):
        folder = Path(service["build"]["dockerfile"]).parent.name
        project = (ROOT / "services" / folder / "pyproject.toml").read_text()
        assert f'name = "{image.partition("/")[2]}"' in project
        assert f'version = "{tag}"' in project


@pytest.mark.parametrize(("path", "name", "service"), services(*HARDENED))
def test_a_container_can_do_little(path: Path, name: str, service: dict[str, Any]) -> None:
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["pids_limit"] > 0
    assert not {"privileged", "cap_add", "devices", "pid", "ipc", "network_mode"} & service.keys()


@pytest.mark.parametrize(("path", "name", "service"), services(*COMPOSE))
def test_nothing_is_published_beyond_this_machine(
    path: Path, name: str, service: dict[str, Any]
) -> None:
    for port in service.get("ports", []):
        assert re.fullmatch(r"127\.0\.0\.1:(\d+):\1", port), port


def test_nodes_share_no_network_with_what_does_not_need_them() -> None:
    told = load(COMPOSE[0])
    on = {
        network: {name for name, one in told["services"].items() if network in one["networks"]}
        for network in told["networks"]
    }
    with_nodes = {network: names for network, names in on.items() if names & NODES}
    # TransferQueue listens in the first alone, Ray in all three.
    assert with_nodes == {
        "cluster": NODES,
        "refit": {*NODES, "refit-server"},
        "otlp": {*NODES, "collector"},
    }
    for network in with_nodes:
        assert told["networks"][network] == {"internal": True}
    for name in NODES:
        assert "ports" not in told["services"][name]
        host, _, port = told["services"][name]["environment"]["RAY_HEAD"].rpartition(":")
        assert port == "6379"
        # A name in that network alone: from it follows where a node listens.
        assert told["services"]["ray-head"]["networks"]["cluster"] == {"aliases": [host]}


def test_ports_are_those_of_the_programs() -> None:
    told = load(COMPOSE[0])["services"]
    assert told["admin"]["ports"] == [f"127.0.0.1:{ADMIN_PORT}:{ADMIN_PORT}"]
    stages = {path.parent.name: last_stage(path) for path in DOCKERFILES}
    assert f"EXPOSE {ADMIN_PORT}\n" in stages["admin"]
    assert f"http://127.0.0.1:{ADMIN_PORT}/readyz" in stages["admin"]
    assert f"EXPOSE {REFIT_PORT} {METRICS_PORT}\n" in stages["refit-server"]
    assert f'"0.0.0.0:{REFIT_PORT}"' in stages["refit-server"]
    config = load_config(DOCKER / "trainer.yaml")
    assert config.refit.control == f"refit-server:{REFIT_PORT}"
    collector = load(DOCKER / "collector.yaml")
    assert collector["exporters"]["otlphttp/admin"]["endpoint"] == f"http://admin:{ADMIN_PORT}"
    receiver = collector["receivers"]["otlp"]["protocols"]["http"]["endpoint"]
    assert config.tracing.endpoint == f"http://collector:{receiver.rpartition(':')[2]}"
    jobs = load(DOCKER / "monitoring" / "prometheus.yaml")["scrape_configs"]
    targets = {job["job_name"]: job["static_configs"][0]["targets"] for job in jobs}
    exported = collector["exporters"]["prometheus"]["endpoint"].rpartition(":")[2]
    assert targets == {
        "run": [f"collector:{exported}"],
        "admin": [f"admin:{ADMIN_PORT}"],
        "refit-server": [f"refit-server:{METRICS_PORT}"],
    }


@pytest.mark.parametrize("path", HARDENED, ids=lambda path: path.parent.name)
def test_every_part_is_on_a_network_with_those_it_calls(path: Path) -> None:
    told = load(COMPOSE[0])["services"] | load(path)["services"]
    calls = {
        "trainer": ["ray-head", "ray-worker", "refit-server", "collector"],
        "ray-worker": ["ray-head", "refit-server", "collector"],
        "collector": ["admin", "jaeger"],
    }
    if path != COMPOSE[0]:
        calls |= {
            "prometheus": ["collector", "admin", "refit-server"],
            "grafana": ["prometheus"],
        }
    for caller, called in calls.items():
        for one in called:
            assert set(told[caller]["networks"]) & set(told[one]["networks"]), (caller, one)


def test_names_by_which_the_admin_service_is_called_are_allowed() -> None:
    command = load(COMPOSE[0])["services"]["admin"]["command"]
    assert "--allowed-host=admin" in command


def test_the_run_of_the_compose_file_is_the_demo_on_its_nodes() -> None:
    config, demo = load_config(DOCKER / "trainer.yaml"), load_config()
    assert config.policy == demo.policy
    assert config.grpo == demo.grpo
    told = load(COMPOSE[0])["services"]
    offered: set[str] = set()
    for name in ("ray-head", "ray-worker"):
        [resources] = [one for one in told[name]["command"] if one.startswith("--resources=")]
        offered |= json.loads(resources.partition("=")[2]).keys()
    placement = config.cluster.placement.model_dump().values()
    assert {name for one in placement for name in one} == offered
    assert config.data_plane["unit_resources"].keys() <= offered
    access = config.refit.control_access
    for path in (access.tls_ca, access.token_file):
        assert path is not None
        assert path.parent == Path("/run/secrets")
        for name in NODES:
            assert path.name in told[name]["secrets"]
    assert str(config.run.output).startswith("/data/")
    assert all("runs:/data" in told[name]["volumes"] for name in NODES)


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("secrets")
    subprocess.run([DOCKER / "secrets", folder], check=True, capture_output=True, timeout=60)
    return folder


@pytest.mark.parametrize("path", HARDENED, ids=lambda path: path.parent.name)
def test_the_script_makes_every_secret_that_is_mounted(path: Path, secrets: Path) -> None:
    told = load(path)["secrets"]
    for name, one in told.items():
        file = Path(os.path.normpath(path.parent / one["file"]))
        assert file.parent == DOCKER / "secrets.d"
        assert file.name == name
        made = secrets / name
        assert stat.S_IMODE(made.stat().st_mode) == 0o644  # another user reads it in the container
        assert not made.read_bytes().endswith(b"\n") or name.startswith("refit-c") or "key" in name
    ignored = subprocess.run(
        ["git", "check-ignore", "--quiet", DOCKER / "secrets.d" / "admin-token"], cwd=ROOT
    )
    assert ignored.returncode == 0


def test_secrets_are_for_their_owner_and_stay(secrets: Path) -> None:
    assert stat.S_IMODE((secrets / "refit-ca-key").stat().st_mode) == 0o600
    before = {path.name: path.read_bytes() for path in secrets.iterdir()}
    subprocess.run([DOCKER / "secrets", secrets], check=True, capture_output=True, timeout=60)
    assert {path.name: path.read_bytes() for path in secrets.iterdir()} == before
    for name in (*(f"refit-server{tail}" for tail in ("", ".rl-dataplane.svc")), "localhost"):
        verify(secrets, authority=secrets / "refit-ca", host=name)


def verify(folder: Path, *, authority: Path, host: str = "refit-server") -> None:
    """That clients with this copy of the authority accept the certificate, and its key is there."""
    checked = subprocess.run(
        ["openssl", "verify", "-CAfile", authority, "-verify_hostname", host, "refit-cert"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert checked.returncode == 0, checked.stderr
    ssl.create_default_context().load_cert_chain(folder / "refit-cert", folder / "refit-key")


@pytest.fixture
def made_before(secrets: Path, tmp_path: Path) -> Path:
    """Secrets that one may change."""
    folder = tmp_path / "secrets"
    shutil.copytree(secrets, folder)
    return folder


@pytest.mark.parametrize("removed", [["refit-cert"], ["refit-key"], ["refit-cert", "refit-key"]])
def test_clients_of_before_accept_a_certificate_that_is_renewed(
    removed: list[str], made_before: Path, secrets: Path
) -> None:
    for name in removed:
        (made_before / name).unlink()
    subprocess.run([DOCKER / "secrets", made_before], check=True, capture_output=True, timeout=60)
    verify(made_before, authority=secrets / "refit-ca")
    changed = {
        path.name
        for path in made_before.iterdir()
        if path.read_bytes() != (secrets / path.name).read_bytes()
    }
    assert changed == {"refit-cert", "refit-key"}


def test_a_new_authority_signs_a_certificate_of_its_own(made_before: Path, secrets: Path) -> None:
    (made_before / "refit-ca").unlink()
    subprocess.run([DOCKER / "secrets", made_before], check=True, capture_output=True, timeout=60)
    assert (made_before / "refit-ca").read_bytes() != (secrets / "refit-ca").read_bytes()
    verify(made_before, authority=made_before / "refit-ca")


def test_a_certificate_is_not_renewed_without_the_authority_s_key(
    made_before: Path, secrets: Path
) -> None:
    (made_before / "refit-ca-key").unlink()
    # With a certificate there is nothing to sign: the key may be kept elsewhere.
    subprocess.run([DOCKER / "secrets", made_before], check=True, capture_output=True, timeout=60)
    (made_before / "refit-cert").unlink()
    done = subprocess.run(
        [DOCKER / "secrets", made_before], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "no refit-ca-key beside refit-ca" in done.stderr
    assert (made_before / "refit-ca").read_bytes() == (secrets / "refit-ca").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "environment", "told"),
    [
        (["boss"], {}, "found 'boss'; expected head, worker or driver"),
        ([], {}, "found ''; expected head, worker or driver"),
        (["worker"], {}, "RAY_HEAD is not set; expected HOST:PORT of the head"),
        (
            ["head"],
            {"RAY_HEAD": "127.0.0.1:6379", "RAY_AUTH_TOKEN_PATH": "/nowhere"},
            "RAY_AUTH_TOKEN_PATH: no token in /nowhere",
        ),
        (
            ["worker"],
            {"RAY_HEAD": "head"},
            "RAY_HEAD: found 'head'; expected HOST:PORT of the head",
        ),
        (
            ["worker"],
            {"RAY_HEAD": "head:6379", "RAY_HEAD_PATIENCE_S": "soon"},
            "RAY_HEAD_PATIENCE_S: found 'soon'; expected whole seconds",
        ),
        (
            ["worker"],
            {"RAY_HEAD": "nobody.invalid:6379", "RAY_HEAD_PATIENCE_S": "0"},
            "RAY_HEAD nobody.invalid:6379: ",
        ),
        (
            ["driver", "true"],
            {"RAY_HEAD": "127.0.0.1:6379", "RAY_HEAD_PATIENCE_S": "0", "RAY_SAYS": "no"},
            "no head with this token and this version of Ray answers at 127.0.0.1:6379, for 0 s",
        ),
    ],
)
def test_a_node_that_cannot_start_says_why_in_a_line(
    arguments: list[str], environment: dict[str, str], told: str, programs: Path
) -> None:
    done = subprocess.run(
        [DOCKER / "trainer" / "ray-node", *arguments],
        env={"PATH": f"{programs}:{os.environ['PATH']}", **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"ray-node: {told}")
    assert done.stderr.count("\n") == 1


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """In front of the path: a python3 in whose view names resolve later, and a ray whose head
    answers later, each after as many questions as a file says; RAY_SAYS=no is a head that never
    does. What ray was told is in a file."""
    folder = tmp_path / "bin"
    folder.mkdir()
    later = """#!/bin/sh
        left=$(cat {0}/{1} 2>/dev/null || echo 0)
        [ "$left" -eq 0 ] || {{ echo $((left - 1)) >{0}/{1}; echo "not yet" >&2; exit 1; }}
        """
    (folder / "python3").write_text(
        f'{later.format(folder, "unresolved")}\nexec {sys.executable} "$@"\n'
    )
    (folder / "ray").write_text(
        f"{later.format(folder, 'unanswered')}\n"
        f'echo "$@" >>{folder}/told\n'
        '[ "$1" != health-check ] || [ "${RAY_SAYS:-}" != no ]\n'
    )
    for program in folder.iterdir():
        program.chmod(0o755)
    return folder


def test_a_node_waits_for_the_head_s_name_and_for_its_answer(programs: Path) -> None:
    (programs / "unresolved").write_text("1")
    (programs / "unanswered").write_text("1")
    done = subprocess.run(
        [DOCKER / "trainer" / "ray-node", "driver", "echo", "begun"],
        env={"PATH": f"{programs}:{os.environ['PATH']}", "RAY_HEAD": "127.0.0.1:6379"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "begun\n", "")
    assert (programs / "unresolved").read_text() == (programs / "unanswered").read_text() == "0\n"
    asked, started = (programs / "told").read_text().splitlines()
    assert asked == "health-check --address 127.0.0.1:6379"
    assert started.startswith("start --address 127.0.0.1:6379 --node-ip-address 127.0.0.1 ")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs the capability CAP_SYS_ADMIN, to mount")
def test_a_container_of_namespaces_has_its_names_where_the_image_has_no_file_for_them(
    tmp_path: Path,
) -> None:
    for name in ("data", "dev", "etc", "proc", "run", "sys", "tmp"):
        (tmp_path / name).mkdir()
    machine = Machine.__new__(Machine)  # only its name and address are asked for
    machine.name, machine.address = "one", "10.77.0.1"
    image = Image(root=tmp_path, entrypoint=[], command=[], health=[], environment={})
    container = Container(image, machine, hosts={"admin": "10.77.0.2"})
    mounts, _, _ = container._setup(["true"]).rpartition("exec ")
    done = subprocess.run(
        ["unshare", "--mount", "--pid", "--net", "--fork", "sh", "-euc", f"{mounts}cat etc/hosts"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "127.0.0.1 localhost\n10.77.0.1 one\n10.77.0.2 admin\n"


def test_the_workflow_is_valid_pins_what_it_uses_and_pushes_only_tags() -> None:
    path = ROOT / ".github" / "workflows" / "images.yml"
    told = load(path)
    # YAML 1.1 reads the key `on` as a truth value.
    events = told.pop(True)
    jsonschema.validate({**told, "on": events}, schema("github-workflows"))
    assert told["permissions"] == {}
    for used in re.findall(r"uses: ([^.\s]\S*.*)$", path.read_text(), re.MULTILINE):
        assert re.fullmatch(r"\S+@[0-9a-f]{40} # v[\d.]+", used), used
    tags = {tag.partition("==")[0] for tag in events["push"]["tags"]}
    names = {
        re.findall(
            r'^name = "(.*)"$', (ROOT / "services" / folder / "pyproject.toml").read_text(), re.M
        )[0]
        for folder in (path.parent.name for path in DOCKERFILES)
    }
    assert tags == names
    assert told["jobs"]["build"]["permissions"] == {"contents": "read"}
    assert "registry" not in json.dumps(told["jobs"]["build"])


def test_shell_scripts_are_shell() -> None:
    for script in (
        ROOT / ".github" / "actions" / "tested" / "tested",
        DOCKER / "install",
        DOCKER / "secrets",
        DOCKER / "build",
        DOCKER / "trainer" / "ray-node",
    ):
        assert os.access(script, os.X_OK)
        subprocess.run([shutil.which("dash") or "sh", "-n", script], check=True, timeout=10)
