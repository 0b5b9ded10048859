"""Dockerfiles, compose files and the images' workflow are valid, hardened and consistent."""

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
def test_hadolint_accepts_the_dockerfile(dockerfile: Path) -> None:
    hadolint = Path(sysconfig.get_path("scripts")) / "hadolint"
    done = subprocess.run([hadolint, dockerfile], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.parent.name)
def test_image_runs_unprivileged_and_has_a_health_check(dockerfile: Path) -> None:
    stage = last_stage(dockerfile)
    assert re.search(r"^USER 10001:10001$", stage, re.MULTILINE)
    assert re.search(r"^HEALTHCHECK .*\\\n +CMD \[", stage, re.MULTILINE)
    assert re.search(r"^ENTRYPOINT \[", stage, re.MULTILINE)
    assert "STOPSIGNAL SIGTERM" in stage
    assert "VOLUME /data" in stage


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.parent.name)
def test_image_has_no_build_tools(dockerfile: Path) -> None:
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


def test_sources_of_an_image_are_not_ignored() -> None:
    included = {line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line[0] == "!"}
    for dockerfile in DOCKERFILES:
        for source in re.findall(r"^COPY (docker/\S+) ", dockerfile.read_text(), re.MULTILINE):
            assert source in included
    for name in included:
        assert (ROOT / name).exists()


@pytest.mark.parametrize("path", COMPOSE, ids=lambda path: path.parent.name)
def test_compose_file_is_valid_and_names_existing_files(path: Path) -> None:
    compose = load(path)
    jsonschema.validate(compose, schema("compose-spec"))
    named = [each["file"] for each in compose.get("configs", {}).values() if "file" in each]
    for service in compose["services"].values():
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
def test_container_is_hardened(path: Path, name: str, service: dict[str, Any]) -> None:
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["pids_limit"] > 0
    assert not {"privileged", "cap_add", "devices", "pid", "ipc", "network_mode"} & service.keys()


@pytest.mark.parametrize(("path", "name", "service"), services(*COMPOSE))
def test_ports_are_published_on_loopback_only(
    path: Path, name: str, service: dict[str, Any]
) -> None:
    for port in service.get("ports", []):
        assert re.fullmatch(r"127\.0\.0\.1:(\d+):\1", port), port


def test_nodes_share_networks_only_with_services_they_use() -> None:
    compose = load(COMPOSE[0])
    on = {
        network: {
            name for name, service in compose["services"].items() if network in service["networks"]
        }
        for network in compose["networks"]
    }
    with_nodes = {network: names for network, names in on.items() if names & NODES}
    # TransferQueue listens only in the first, Ray in all three.
    assert with_nodes == {
        "cluster": NODES,
        "refit": {*NODES, "refit-server"},
        "otlp": {*NODES, "collector"},
    }
    for network in with_nodes:
        assert compose["networks"][network] == {"internal": True}
    for name in NODES:
        assert "ports" not in compose["services"][name]
        host, _, port = compose["services"][name]["environment"]["RAY_HEAD"].rpartition(":")
        assert port == "6379"
        # Only this network has the alias, so a node listens on its address in this network.
        assert compose["services"]["ray-head"]["networks"]["cluster"] == {"aliases": [host]}


def test_ports_match_the_programs() -> None:
    declared = load(COMPOSE[0])["services"]
    assert declared["admin"]["ports"] == [f"127.0.0.1:{ADMIN_PORT}:{ADMIN_PORT}"]
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
def test_service_shares_a_network_with_those_it_calls(path: Path) -> None:
    declared = load(COMPOSE[0])["services"] | load(path)["services"]
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
        for name in called:
            shared = set(declared[caller]["networks"]) & set(declared[name]["networks"])
            assert shared, (caller, name)


def test_admin_service_allows_its_compose_host_name() -> None:
    command = load(COMPOSE[0])["services"]["admin"]["command"]
    assert "--allowed-host=admin" in command


def test_override_of_the_recipe_adds_alert_rules() -> None:
    recipe = (ROOT / "docs" / "recipes" / "dashboard-service.md").read_text()
    [block] = re.findall(r"^```yaml\n(.*?)^```", recipe, re.MULTILINE | re.DOTALL)
    override = yaml.safe_load(block)
    jsonschema.validate(override, schema("compose-spec"))
    admin = override["services"]["admin"]
    [(variable, path)] = admin["environment"].items()
    option = variable.removeprefix("DATAPLANE_ADMIN_SERVE_").lower()
    assert option in inspect.signature(serve_admin).parameters
    assert admin["secrets"] == list(override["secrets"])
    assert path.rpartition("/")[2] in admin["secrets"]
    compose = load(COMPOSE[0])
    assert not override["secrets"].keys() & compose["secrets"].keys()
    assert "environment" not in compose["services"]["admin"]


def test_compose_run_is_the_demo_on_the_compose_nodes() -> None:
    config, demo = load_config(DOCKER / "trainer.yaml"), load_config()
    assert config.policy == demo.policy
    assert config.grpo == demo.grpo
    declared = load(COMPOSE[0])["services"]
    available: set[str] = set()
    for name in ("ray-head", "ray-worker"):
        [resources] = [
            word for word in declared[name]["command"] if word.startswith("--resources=")
        ]
        available |= json.loads(resources.partition("=")[2]).keys()
    placement = config.cluster.placement.model_dump().values()
    assert {name for resources in placement for name in resources} == available
    assert config.data_plane["unit_resources"].keys() <= available
    access = config.refit.control_access
    for path in (access.tls_ca, access.token_file):
        assert path is not None
        assert path.parent == Path("/run/secrets")
        for name in NODES:
            assert path.name in declared[name]["secrets"]
    assert str(config.run.output).startswith("/data/")
    assert all("runs:/data" in declared[name]["volumes"] for name in NODES)


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("secrets")
    subprocess.run([DOCKER / "secrets", folder], check=True, capture_output=True, timeout=60)
    return folder


@pytest.mark.parametrize("path", HARDENED, ids=lambda path: path.parent.name)
def test_script_makes_every_mounted_secret(path: Path, secrets: Path) -> None:
    for name, declared in load(path)["secrets"].items():
        file = Path(os.path.normpath(path.parent / declared["file"]))
        assert file.parent == DOCKER / "secrets.d"
        assert file.name == name
        secret = secrets / name
        assert stat.S_IMODE(secret.stat().st_mode) == 0o644  # the container has another user
        ends_in_newline = secret.read_bytes().endswith(b"\n")
        assert not ends_in_newline or name.startswith("refit-c") or "key" in name
    ignored = subprocess.run(
        ["git", "check-ignore", "--quiet", DOCKER / "secrets.d" / "admin-token"], cwd=ROOT
    )
    assert ignored.returncode == 0


def test_secrets_are_private_and_not_overwritten(secrets: Path) -> None:
    assert stat.S_IMODE((secrets / "refit-ca-key").stat().st_mode) == 0o600
    before = {path.name: path.read_bytes() for path in secrets.iterdir()}
    subprocess.run([DOCKER / "secrets", secrets], check=True, capture_output=True, timeout=60)
    assert {path.name: path.read_bytes() for path in secrets.iterdir()} == before
    for name in (*(f"refit-server{tail}" for tail in ("", ".rl-dataplane.svc")), "localhost"):
        verify(secrets, authority=secrets / "refit-ca", host=name)


def verify(folder: Path, *, authority: Path, host: str = "refit-server") -> None:
    """Check that the certificate has its key and is valid for clients with this authority."""
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
    """Return a copy of the secrets, which the test may change."""
    folder = tmp_path / "secrets"
    shutil.copytree(secrets, folder)
    return folder


@pytest.mark.parametrize("removed", [["refit-cert"], ["refit-key"], ["refit-cert", "refit-key"]])
def test_existing_clients_accept_a_renewed_certificate(
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


def test_new_authority_signs_a_new_certificate(made_before: Path, secrets: Path) -> None:
    (made_before / "refit-ca").unlink()
    subprocess.run([DOCKER / "secrets", made_before], check=True, capture_output=True, timeout=60)
    assert (made_before / "refit-ca").read_bytes() != (secrets / "refit-ca").read_bytes()
    verify(made_before, authority=made_before / "refit-ca")


def test_certificate_is_not_renewed_without_the_ca_key(made_before: Path, secrets: Path) -> None:
    (made_before / "refit-ca-key").unlink()
    # The existing certificate needs no signature, so the key may be stored elsewhere.
    subprocess.run([DOCKER / "secrets", made_before], check=True, capture_output=True, timeout=60)
    (made_before / "refit-cert").unlink()
    done = subprocess.run(
        [DOCKER / "secrets", made_before], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "no refit-ca-key next to refit-ca" in done.stderr
    assert (made_before / "refit-ca").read_bytes() == (secrets / "refit-ca").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
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
            {"RAY_HEAD": "head:6379", "RAY_HEAD_TIMEOUT_S": "soon"},
            "RAY_HEAD_TIMEOUT_S: found 'soon'; expected an integer",
        ),
        (
            ["worker"],
            {"RAY_HEAD": "unknown.invalid:6379", "RAY_HEAD_TIMEOUT_S": "0"},
            "RAY_HEAD unknown.invalid:6379: ",
        ),
        (
            ["driver", "true"],
            {"RAY_HEAD": "127.0.0.1:6379", "RAY_HEAD_TIMEOUT_S": "0", "RAY_SAYS": "no"},
            "no head with this token and this version of Ray answered at 127.0.0.1:6379 in 0 s",
        ),
    ],
)
def test_failed_node_start_prints_one_line(
    arguments: list[str], environment: dict[str, str], message: str, programs: Path
) -> None:
    done = subprocess.run(
        [DOCKER / "trainer" / "ray-node", *arguments],
        env={"PATH": f"{programs}:{os.environ['PATH']}", **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"ray-node: {message}")
    assert done.stderr.count("\n") == 1


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """Return a folder to put first on the path, with substitutes for ``python3`` and ``ray``.

    Each fails as often as the number in its file says: ``unresolved`` for ``python3``, which
    resolves names, and ``unanswered`` for ``ray``, which asks the head. With RAY_SAYS=no the head
    never answers. The file ``calls`` has ray's arguments, one call a line.
    """
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
        f'echo "$@" >>{folder}/calls\n'
        '[ "$1" != health-check ] || [ "${RAY_SAYS:-}" != no ]\n'
    )
    for program in folder.iterdir():
        program.chmod(0o755)
    return folder


def test_node_waits_for_the_heads_name_and_answer(programs: Path) -> None:
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
    health_check, start = (programs / "calls").read_text().splitlines()
    assert health_check == "health-check --address 127.0.0.1:6379"
    assert start.startswith("start --address 127.0.0.1:6379 --node-ip-address 127.0.0.1 ")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs the capability CAP_SYS_ADMIN, to mount")
def test_namespace_container_resolves_its_host_names(
    tmp_path: Path,
) -> None:
    for name in ("data", "dev", "etc", "proc", "run", "sys", "tmp"):
        (tmp_path / name).mkdir()
    machine = Machine.__new__(Machine)  # only its name and address are used
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


def test_workflow_pushes_only_tags_of_services() -> None:
    workflow = load(ROOT / ".github" / "workflows" / "images.yml")
    events = workflow[True]  # YAML 1.1 reads the key `on` as true
    tags = {tag.partition("==")[0] for tag in events["push"]["tags"]}
    names = {
        re.findall(
            r'^name = "(.*)"$', (ROOT / "services" / folder / "pyproject.toml").read_text(), re.M
        )[0]
        for folder in (path.parent.name for path in DOCKERFILES)
    }
    assert tags == names
    assert workflow["jobs"]["build"]["permissions"] == {"contents": "read"}
    assert "registry" not in json.dumps(workflow["jobs"]["build"])


def test_shell_scripts_are_executable_and_parse() -> None:
    for script in (
        ROOT / ".github" / "actions" / "tested" / "tested",
        DOCKER / "install",
        DOCKER / "secrets",
        DOCKER / "build",
        DOCKER / "trainer" / "ray-node",
    ):
        assert os.access(script, os.X_OK)
        subprocess.run([shutil.which("dash") or "sh", "-n", script], check=True, timeout=10)
