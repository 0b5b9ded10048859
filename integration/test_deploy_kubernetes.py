"""The manifests of Kubernetes: valid, closed to others, consistent with the programs."""

from __future__ import annotations

import inspect
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import ray
import yaml

from dataplane_admin.cli import serve as serve_admin
from grpo_trainer import load_config
from refit_server.cli import serve as serve_refit

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy" / "kubernetes"
NAMESPACE = "rl-dataplane"
ADMIN_PORT = int(inspect.signature(serve_admin).parameters["port"].default)
REFIT_PORT = int(inspect.signature(serve_refit).parameters["address"].default.rpartition(":")[2])
RAY_PORT = 6379
IN_CLUSTER = {"rl-dataplane/network": "cluster"}
VERSIONS = ["1.30", "1.33"]
Object = dict[str, Any]


def documents(*folders: str) -> list[Object]:
    """What stands in the files of a kustomization."""
    found: list[Object] = []
    for folder in folders:
        kustomization = yaml.safe_load((DEPLOY / folder / "kustomization.yaml").read_text())
        assert kustomization["namespace"] == NAMESPACE
        for name in kustomization["resources"]:
            found += list(yaml.safe_load_all((DEPLOY / folder / name).read_text()))
    return found


ALL = documents("base", "run")


def of_kind(kind: str) -> dict[str, Object]:
    return {one["metadata"]["name"]: one for one in ALL if one["kind"] == kind}


def ray_templates() -> Iterator[tuple[str, Object]]:
    [cluster] = of_kind("RayCluster").values()
    yield "head", cluster["spec"]["headGroupSpec"]["template"]
    for group in cluster["spec"]["workerGroupSpecs"]:
        yield group["groupName"], group["template"]


def templates() -> dict[str, Object]:
    """The pods of everything, by what they are."""
    made = [
        (name, one["spec"]["template"])
        for kind in ("StatefulSet", "Job")
        for name, one in of_kind(kind).items()
    ]
    return dict([*made, *ray_templates()])


PODS = templates()


def as_pod(name: str, template: Object) -> Object:
    metadata = {"name": name, **template.get("metadata", {})}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def check(one: Object) -> None:
    """By the schemas of Kubernetes; KubeRay's are not to be had as a package."""
    for version in VERSIONS:
        if one["kind"] != "RayCluster":
            kubernetes_validate.validate(one, version, strict=True)


@pytest.mark.parametrize("one", ALL, ids=lambda one: f"{one['kind']}-{one['metadata']['name']}")
def test_an_object_is_valid(one: Object) -> None:
    check(one)


@pytest.mark.parametrize(("name", "template"), list(ray_templates()), ids=dict(ray_templates()))
def test_a_pod_of_ray_is_valid(name: str, template: Object) -> None:
    check(as_pod(name, template))


def test_the_ray_cluster_has_the_keys_that_kuberay_documents() -> None:
    # Not KubeRay's schema: the fields of ray.io/v1 that are used here, from its documentation.
    [cluster] = of_kind("RayCluster").values()
    assert cluster["apiVersion"] == "ray.io/v1"
    spec = cluster["spec"]
    assert spec.keys() == {"rayVersion", "headGroupSpec", "workerGroupSpecs"}
    assert spec["rayVersion"] == ray.__version__
    assert spec["headGroupSpec"].keys() == {"serviceType", "rayStartParams", "template"}
    for group in spec["workerGroupSpecs"]:
        replicas = ["replicas", "minReplicas", "maxReplicas"]
        assert group.keys() == {"groupName", *replicas, "rayStartParams", "template"}
        assert len({group[one] for one in replicas}) == 1  # no autoscaler: a run keeps its nodes
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        assert all(isinstance(one, str) for one in group["rayStartParams"].values())
        # KubeRay puts in its own, which need wget and the dashboard, only where there are none.
        [container] = group["template"]["spec"]["containers"]
        assert {"startupProbe", "readinessProbe", "livenessProbe"} <= container.keys()
        # Its service finds the head by this label, which KubeRay sets.
        assert "app.kubernetes.io/name" not in group["template"]["metadata"]["labels"]


@pytest.mark.parametrize(("name", "template"), PODS.items(), ids=PODS)
def test_a_pod_can_do_little(name: str, template: Object) -> None:
    spec = template["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] == 10001  # of the images
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
    for container in spec["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
        assert "memory" in container["resources"]["limits"]
        mounted = {one["mountPath"] for one in container["volumeMounts"]}
        assert {"/tmp", "/data"} <= mounted  # what is written is somewhere


@pytest.mark.parametrize(("name", "template"), PODS.items(), ids=PODS)
def test_images_have_versions(name: str, template: Object) -> None:
    for container in template["spec"]["containers"]:
        image, _, tag = container["image"].rpartition(":")
        found = [
            path
            for path in (ROOT / "services").glob("*/pyproject.toml")
            if f'name = "{image.removeprefix("rl-dataplane/")}"' in path.read_text()
        ]
        assert len(found) == 1, image
        assert f'version = "{tag}"' in found[0].read_text()


@pytest.mark.parametrize(("name", "template"), PODS.items(), ids=PODS)
def test_what_a_pod_mounts_is_there_or_is_documented(name: str, template: Object) -> None:
    guide = (DEPLOY / "README.md").read_text()
    spec = template["spec"]
    volumes = {one["name"]: one for one in spec.get("volumes", [])}
    owner = of_kind("StatefulSet").get(name)
    claimed = owner["spec"]["volumeClaimTemplates"] if owner else []
    declared = volumes.keys() | {one["metadata"]["name"] for one in claimed}
    for container in spec["containers"]:
        assert {one["name"] for one in container["volumeMounts"]} == declared
    asked = {one["secret"]["secretName"] for one in volumes.values() if "secret" in one}
    for container in spec["containers"]:
        for variable in container.get("env", []):
            if "valueFrom" in variable:
                asked.add(variable["valueFrom"]["secretKeyRef"]["name"])
    assert asked
    for secret in asked:
        assert f"secret generic {secret} " in guide or f"secret tls {secret} " in guide


def test_no_secret_is_included() -> None:
    assert not of_kind("Secret")
    for path in DEPLOY.rglob("*.yaml"):
        assert not re.search(r"BEGIN|[0-9a-f]{32}", path.read_text()), path


def policies() -> dict[str, Object]:
    return {name: one["spec"] for name, one in of_kind("NetworkPolicy").items()}


def test_nobody_reaches_anybody_unless_it_is_said() -> None:
    assert policies()["default-deny"] == {
        "podSelector": {},
        "policyTypes": ["Ingress", "Egress"],
    }


def selects(selector: Object, labels: Object) -> bool:
    assert selector.keys() <= {"matchLabels"}
    return selector.get("matchLabels", {}).items() <= labels.items()


def reachable(caller: str, called: str) -> set[int | str]:
    """Ports of a pod that another pod of the namespace reaches; "all" for every port."""

    def ports(rules: list[Object], side: str, labels: Object) -> set[int | str]:
        found: set[int | str] = set()
        for rule in rules:
            for peer in rule[side]:
                if "namespaceSelector" not in peer and selects(peer["podSelector"], labels):
                    found |= {one["port"] for one in rule.get("ports", [])} or {"all"}
        return found

    sender, receiver = (PODS[one]["metadata"].get("labels", {}) for one in (caller, called))
    out: set[int | str] = set()
    into: set[int | str] = set()
    for policy in policies().values():
        if selects(policy["podSelector"], sender):
            out |= ports(policy.get("egress", []), "to", receiver)
        if selects(policy["podSelector"], receiver):
            into |= ports(policy.get("ingress", []), "from", sender)
    if "all" in out:
        return into
    return out if "all" in into else out & into


def test_the_ports_of_ray_and_transferqueue_are_open_to_nodes_and_drivers_alone() -> None:
    nodes = {
        name for name, one in PODS.items() if selects({"matchLabels": IN_CLUSTER}, _labels(one))
    }
    assert nodes == {"head", "trainers", "generators", "trainer"}
    for caller in PODS:
        for called in nodes:
            expected = {"all"} if caller in nodes else set()
            assert reachable(caller, called) == expected, (caller, called)
    for name, policy in policies().items():
        if not selects(policy["podSelector"], IN_CLUSTER):
            continue
        for rule in policy.get("ingress", []):
            for peer in rule["from"]:
                assert peer == {"podSelector": {"matchLabels": IN_CLUSTER}}, name


def _labels(template: Object) -> Object:
    labels: Object = template["metadata"].get("labels", {})
    return labels


def test_services_are_reached_at_their_ports_alone() -> None:
    for node in ("head", "trainers", "generators", "trainer"):
        assert reachable(node, "refit-server") == {REFIT_PORT}
        assert reachable(node, "admin") == {ADMIN_PORT}
    assert reachable("refit-server", "admin") == reachable("admin", "refit-server") == set()
    assert {name: _ports_of_services()[name] for name in ("admin", "refit-server")} == {
        "admin": {ADMIN_PORT},
        "refit-server": {REFIT_PORT, 9464},
    }


def _ports_of_services() -> dict[str, set[int]]:
    return {
        name: {port["port"] for port in one["spec"]["ports"]}
        for name, one in of_kind("Service").items()
    }


def test_other_namespaces_reach_what_they_are_let_into_by_label() -> None:
    from_outside = {
        (name, tuple(peer["namespaceSelector"]["matchLabels"].items()), rule["ports"][0]["port"])
        for name, policy in policies().items()
        for rule in policy.get("ingress", [])
        for peer in rule["from"]
        if "namespaceSelector" in peer
    }
    monitoring = (("rl-dataplane/monitoring", "true"),)
    assert from_outside == {
        ("admin", (("rl-dataplane/ingress", "true"),), ADMIN_PORT),
        ("admin", monitoring, ADMIN_PORT),
        ("refit-server", monitoring, 9464),
    }
    out = [
        (peer["namespaceSelector"], rule["ports"])
        for policy in policies().values()
        for rule in policy.get("egress", [])
        for peer in rule["to"]
        if "namespaceSelector" in peer
    ]
    assert [{port["port"] for port in ports} for _, ports in out] == [{53}]


def test_services_select_pods_that_there_are() -> None:
    for one in of_kind("Service").values():
        matching = [
            name
            for name, template in PODS.items()
            if one["spec"]["selector"].items() <= _labels(template).items()
        ]
        assert matching == [one["metadata"]["name"]]


def test_nodes_can_be_drained_while_there_is_no_run() -> None:
    assert not [one for one in documents("base") if one["kind"] == "PodDisruptionBudget"]


def test_budgets_count_the_pods_that_there_are() -> None:
    [cluster] = of_kind("RayCluster").values()
    groups = cluster["spec"]["workerGroupSpecs"]
    budget = of_kind("PodDisruptionBudget")["ray"]["spec"]
    assert budget["minAvailable"] == 1 + sum(group["replicas"] for group in groups)
    selected = {"ray.io/cluster": cluster["metadata"]["name"]}
    assert budget["selector"]["matchLabels"] == selected


def test_probes_ask_what_answers() -> None:
    [admin] = PODS["admin"]["spec"]["containers"]
    paths = {admin[one]["httpGet"]["path"] for one in ("startupProbe", "livenessProbe")}
    assert paths == {"/healthz"}
    assert admin["readinessProbe"]["httpGet"]["path"] == "/readyz"
    for one in ("startupProbe", "livenessProbe", "readinessProbe"):
        # The service answers to names that it knows, of which the pod's address is none.
        assert {"name": "Host", "value": "localhost"} in admin[one]["httpGet"]["httpHeaders"]
    [refit] = PODS["refit-server"]["spec"]["containers"]
    assert refit["readinessProbe"]["exec"]["command"][:2] == ["refit-server", "check"]


def test_stops_have_the_time_they_may_take() -> None:
    shutdown_s = inspect.signature(serve_admin).parameters["shutdown_timeout_s"].default
    grace_s = inspect.signature(serve_refit).parameters["grace_s"].default
    for name, least in (("admin", shutdown_s), ("refit-server", grace_s)):
        assert PODS[name]["spec"]["terminationGracePeriodSeconds"] > least


def variables(name: str) -> dict[str, str]:
    """What the environment of a pod's container is told, but for secrets."""
    [container] = PODS[name]["spec"]["containers"]
    return {one["name"]: one["value"] for one in container["env"] if "value" in one}


def test_a_head_gives_up_on_silent_nodes_as_soon_as_ray_node_does_and_the_page_says() -> None:
    told = {name: one for name, one in variables("head").items() if "health_check" in name}
    script = (ROOT / "docker" / "trainer" / "ray-node").read_text()
    exported = dict(re.findall(r'export (RAY_health_check_\w+)="\$\{\1:-(\d+)\}"', script))
    assert told == exported
    period_ms, timeout_ms, failures = (
        int(told[f"RAY_health_check_{name}"])
        for name in ("period_ms", "timeout_ms", "failure_threshold")
    )
    page = (ROOT / "docs" / "operations.md").read_text()
    [row] = [line for line in page.splitlines() if "`RAY_health_check_*`" in line]
    assert f" {failures * (period_ms + timeout_ms) // 1000} s " in row


def test_a_run_waits_for_nodes_as_long_as_the_guide_says() -> None:
    guide = " ".join((DEPLOY / "README.md").read_text().split())
    assert "it waits ten minutes for the head and as long for the nodes" in guide
    assert variables("trainer")["RAY_HEAD_PATIENCE_S"] == "600"
    assert load_config(DEPLOY / "run" / "config.yaml").cluster.nodes_timeout_s == 600


def test_the_run_is_the_demo_on_the_nodes_of_the_cluster() -> None:
    config, demo = load_config(DEPLOY / "run" / "config.yaml"), load_config()
    assert config.policy == demo.policy
    assert config.grpo == demo.grpo
    assert config.refit.control == f"refit-server:{REFIT_PORT}"
    assert config.tracing.endpoint == f"http://admin:{ADMIN_PORT}"
    [admin] = PODS["admin"]["spec"]["containers"]
    assert "--allowed-host=admin" in admin["args"]
    [cluster] = of_kind("RayCluster").values()
    offered: set[str] = set()
    for group in cluster["spec"]["workerGroupSpecs"]:
        # It passes a shell, which takes the outer quotes and the backslashes.
        offered |= json.loads(json.loads(group["rayStartParams"]["resources"])).keys()
    placement = config.cluster.placement.model_dump().values()
    assert {name for one in placement for name in one} == offered
    address = variables("trainer")["RAY_HEAD"]
    assert address == f"{cluster['metadata']['name']}-head-svc:{RAY_PORT}"
    access = config.refit.control_access
    for path in (access.tls_ca, access.token_file):
        assert path is not None
        for name in ("head", "trainers", "generators", "trainer"):
            [container] = PODS[name]["spec"]["containers"]
            assert str(path.parent) in {one["mountPath"] for one in container["volumeMounts"]}


def kustomized(folder: str) -> str:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("needs the package kubectl, whose kustomize renders the manifests")
    done = subprocess.run(
        [kubectl, "kustomize", str(DEPLOY / folder)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("folder", ["base", "run", "overlays/example", "overlays/example-run"])
def test_kustomize_renders_it_and_what_it_renders_is_valid(folder: str) -> None:
    rendered = list(yaml.safe_load_all(kustomized(folder)))
    assert len(rendered) >= 3
    for one in rendered:
        check(one)
        if one["kind"] != "Namespace":
            assert one["metadata"]["namespace"] == NAMESPACE


def test_overlays_change_what_belongs_together_and_take_every_image_from_the_registry() -> None:
    told = kustomized("overlays/example"), kustomized("overlays/example-run")
    cluster, run = (list(yaml.safe_load_all(one)) for one in told)
    [nodes] = [one["spec"] for one in cluster if one["kind"] == "RayCluster"]
    [budget] = [one["spec"] for one in run if one["metadata"]["name"] == "ray"]
    groups = nodes["workerGroupSpecs"]
    assert budget["minAvailable"] == 1 + sum(group["replicas"] for group in groups)
    images = [set(re.findall(r"image: (\S+)", one)) for one in told]
    assert [len(one) for one in images] == [3, 1]
    assert all(image.startswith("registry.example/") for one in images for image in one)
    assert images[1] < images[0]  # the driver is a node of the same cluster


def test_the_run_of_an_overlay_computes_on_the_gpus_of_its_cluster() -> None:
    cluster, run = (
        list(yaml.safe_load_all(kustomized(f"overlays/{name}")))
        for name in ("example", "example-run")
    )
    [nodes] = [one["spec"]["workerGroupSpecs"] for one in cluster if one["kind"] == "RayCluster"]
    offered = {
        group["groupName"]: group["replicas"]
        * int(group["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
        for group in nodes
    }
    [told] = [one for one in run if one["kind"] == "ConfigMap"]
    [job] = [one for one in run if one["kind"] == "Job"]
    mounted = {
        one["configMap"]["name"]
        for one in job["spec"]["template"]["spec"]["volumes"]
        if "configMap" in one
    }
    assert mounted == {told["metadata"]["name"]}
    [text] = told["data"].values()
    config = yaml.safe_load(text)
    policy = config["policy"]
    assert policy["num_gpus_per_worker"] * policy["data_parallel"] == offered["trainers"]
    assert policy["generation"]["num_gpus"] == offered["generators"]
    # Else it is the run that is kept beside it.
    policy["num_gpus_per_worker"] = policy["generation"]["num_gpus"] = 0
    assert config == yaml.safe_load((DEPLOY / "run" / "config.yaml").read_text())
    assert (
        load_config(DEPLOY / "overlays" / "example-run" / "config.yaml").policy.data_parallel == 2
    )
