"""The Kubernetes manifests are valid, restrict access, and match the programs."""

from __future__ import annotations

import inspect
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import kubernetes_validate
import pytest
import ray
import yaml
from integration.test_deploy_images import ADMIN_PORT, METRICS_PORT, REFIT_PORT, ROOT

from dataplane_admin.cli import serve as serve_admin
from grpo_trainer import load_config
from refit_server.cli import serve as serve_refit

DEPLOY = ROOT / "deploy" / "kubernetes"
NAMESPACE = "rl-dataplane"
RAY_PORT = 6379
IN_CLUSTER = {"rl-dataplane/network": "cluster"}
VERSIONS = ["1.30", "1.33"]
Object = dict[str, Any]


def documents(*folders: str) -> list[Object]:
    """Return the objects of kustomizations."""
    objects: list[Object] = []
    for folder in folders:
        kustomization = yaml.safe_load((DEPLOY / folder / "kustomization.yaml").read_text())
        assert kustomization["namespace"] == NAMESPACE
        for name in kustomization["resources"]:
            objects += list(yaml.safe_load_all((DEPLOY / folder / name).read_text()))
    return objects


ALL = documents("base", "run")


def of_kind(kind: str) -> dict[str, Object]:
    return {each["metadata"]["name"]: each for each in ALL if each["kind"] == kind}


def ray_templates() -> Iterator[tuple[str, Object]]:
    [cluster] = of_kind("RayCluster").values()
    yield "head", cluster["spec"]["headGroupSpec"]["template"]
    for group in cluster["spec"]["workerGroupSpecs"]:
        yield group["groupName"], group["template"]


def templates() -> dict[str, Object]:
    """Return all pod templates by the name of their owner."""
    owned = [
        (name, owner["spec"]["template"])
        for kind in ("StatefulSet", "Job")
        for name, owner in of_kind(kind).items()
    ]
    return dict([*owned, *ray_templates()])


PODS = templates()


def as_pod(name: str, template: Object) -> Object:
    metadata = {"name": name, **template.get("metadata", {})}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def validate(manifest: Object) -> None:
    """Validate an object by the schemas of Kubernetes; no package has KubeRay's schemas."""
    for version in VERSIONS:
        if manifest["kind"] != "RayCluster":
            kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize(
    "manifest", ALL, ids=lambda each: f"{each['kind']}-{each['metadata']['name']}"
)
def test_object_is_valid(manifest: Object) -> None:
    validate(manifest)


@pytest.mark.parametrize(("name", "template"), list(ray_templates()), ids=dict(ray_templates()))
def test_pod_of_ray_is_valid(name: str, template: Object) -> None:
    validate(as_pod(name, template))


def test_ray_cluster_has_the_keys_kuberay_documents() -> None:
    # In place of KubeRay's schema: the fields of ray.io/v1 used here, from its documentation.
    [cluster] = of_kind("RayCluster").values()
    assert cluster["apiVersion"] == "ray.io/v1"
    spec = cluster["spec"]
    assert spec.keys() == {"rayVersion", "headGroupSpec", "workerGroupSpecs"}
    assert spec["rayVersion"] == ray.__version__
    assert spec["headGroupSpec"].keys() == {"serviceType", "rayStartParams", "template"}
    for group in spec["workerGroupSpecs"]:
        replicas = ["replicas", "minReplicas", "maxReplicas"]
        assert group.keys() == {"groupName", *replicas, "rayStartParams", "template"}
        assert len({group[key] for key in replicas}) == 1  # no autoscaler: a run keeps its nodes
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        # Without probes, KubeRay would add its own, which need wget and the dashboard.
        [container] = group["template"]["spec"]["containers"]
        assert {"startupProbe", "readinessProbe", "livenessProbe"} <= container.keys()
        # KubeRay sets this label, by which its service selects the head.
        assert "app.kubernetes.io/name" not in group["template"]["metadata"]["labels"]


@pytest.mark.parametrize(("name", "template"), PODS.items(), ids=PODS)
def test_pod_is_hardened(name: str, template: Object) -> None:
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
        mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert {"/tmp", "/data"} <= mounted  # the only writable folders


@pytest.mark.parametrize(("name", "template"), PODS.items(), ids=PODS)
def test_images_have_versions(name: str, template: Object) -> None:
    for container in template["spec"]["containers"]:
        image, _, tag = container["image"].rpartition(":")
        projects = [
            path
            for path in (ROOT / "services").glob("*/pyproject.toml")
            if f'name = "{image.removeprefix("rl-dataplane/")}"' in path.read_text()
        ]
        assert len(projects) == 1, image
        assert f'version = "{tag}"' in projects[0].read_text()


@pytest.mark.parametrize(("name", "template"), PODS.items(), ids=PODS)
def test_mounts_of_a_pod_are_declared_or_documented(name: str, template: Object) -> None:
    guide = (DEPLOY / "README.md").read_text()
    spec = template["spec"]
    volumes = {volume["name"]: volume for volume in spec.get("volumes", [])}
    owner = of_kind("StatefulSet").get(name)
    claimed = owner["spec"]["volumeClaimTemplates"] if owner else []
    declared = volumes.keys() | {claim["metadata"]["name"] for claim in claimed}
    for container in spec["containers"]:
        assert {mount["name"] for mount in container["volumeMounts"]} == declared
    secrets = {volume["secret"]["secretName"] for volume in volumes.values() if "secret" in volume}
    for container in spec["containers"]:
        for variable in container.get("env", []):
            if "valueFrom" in variable:
                secrets.add(variable["valueFrom"]["secretKeyRef"]["name"])
    assert secrets
    for secret in secrets:
        assert f"secret generic {secret} " in guide or f"secret tls {secret} " in guide


def test_no_secret_is_included() -> None:
    assert not of_kind("Secret")
    for path in DEPLOY.rglob("*.yaml"):
        assert not re.search(r"BEGIN|[0-9a-f]{32}", path.read_text()), path


def policies() -> dict[str, Object]:
    return {name: policy["spec"] for name, policy in of_kind("NetworkPolicy").items()}


def test_network_traffic_is_denied_by_default() -> None:
    assert policies()["default-deny"] == {
        "podSelector": {},
        "policyTypes": ["Ingress", "Egress"],
    }


def selects(selector: Object, labels: Object) -> bool:
    assert selector.keys() <= {"matchLabels"}
    return selector.get("matchLabels", {}).items() <= labels.items()


def reachable(caller: str, called: str) -> set[int | str]:
    """Return the ports of a pod that another pod of the namespace reaches; "all" for every port."""

    def ports(rules: list[Object], side: str, labels: Object) -> set[int | str]:
        allowed: set[int | str] = set()
        for rule in rules:
            for peer in rule[side]:
                if "namespaceSelector" not in peer and selects(peer["podSelector"], labels):
                    allowed |= {port["port"] for port in rule.get("ports", [])} or {"all"}
        return allowed

    sender, receiver = (PODS[name]["metadata"].get("labels", {}) for name in (caller, called))
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


def test_only_nodes_and_drivers_reach_ray_and_transferqueue() -> None:
    nodes = {
        name for name, pod in PODS.items() if selects({"matchLabels": IN_CLUSTER}, _labels(pod))
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


def test_services_are_reachable_only_at_their_ports() -> None:
    for node in ("head", "trainers", "generators", "trainer"):
        assert reachable(node, "refit-server") == {REFIT_PORT}
        assert reachable(node, "admin") == {ADMIN_PORT}
    assert reachable("refit-server", "admin") == reachable("admin", "refit-server") == set()
    assert {name: _ports_of_services()[name] for name in ("admin", "refit-server")} == {
        "admin": {ADMIN_PORT},
        "refit-server": {REFIT_PORT, METRICS_PORT},
    }


def _ports_of_services() -> dict[str, set[int]]:
    return {
        name: {port["port"] for port in service["spec"]["ports"]}
        for name, service in of_kind("Service").items()
    }


def test_labeled_namespaces_reach_only_these_ports() -> None:
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
        ("refit-server", monitoring, METRICS_PORT),
    }
    out = [
        (peer["namespaceSelector"], rule["ports"])
        for policy in policies().values()
        for rule in policy.get("egress", [])
        for peer in rule["to"]
        if "namespaceSelector" in peer
    ]
    assert [{port["port"] for port in ports} for _, ports in out] == [{53}]


def test_services_select_existing_pods() -> None:
    for service in of_kind("Service").values():
        matching = [
            name
            for name, template in PODS.items()
            if service["spec"]["selector"].items() <= _labels(template).items()
        ]
        assert matching == [service["metadata"]["name"]]


def test_nodes_can_be_drained_while_there_is_no_run() -> None:
    assert not [each for each in documents("base") if each["kind"] == "PodDisruptionBudget"]


def test_disruption_budget_counts_the_pods() -> None:
    [cluster] = of_kind("RayCluster").values()
    groups = cluster["spec"]["workerGroupSpecs"]
    budget = of_kind("PodDisruptionBudget")["ray"]["spec"]
    assert budget["minAvailable"] == 1 + sum(group["replicas"] for group in groups)
    selected = {"ray.io/cluster": cluster["metadata"]["name"]}
    assert budget["selector"]["matchLabels"] == selected


def test_probes_call_existing_endpoints() -> None:
    [admin] = PODS["admin"]["spec"]["containers"]
    paths = {admin[probe]["httpGet"]["path"] for probe in ("startupProbe", "livenessProbe")}
    assert paths == {"/healthz"}
    assert admin["readinessProbe"]["httpGet"]["path"] == "/readyz"
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        # The service answers only to allowed host names, not to the pod's address.
        assert {"name": "Host", "value": "localhost"} in admin[probe]["httpGet"]["httpHeaders"]
    [refit] = PODS["refit-server"]["spec"]["containers"]
    assert refit["readinessProbe"]["exec"]["command"][:2] == ["refit-server", "check"]


def test_termination_grace_exceeds_the_shutdown_timeout() -> None:
    shutdown_s = inspect.signature(serve_admin).parameters["shutdown_timeout_s"].default
    grace_s = inspect.signature(serve_refit).parameters["grace_s"].default
    for name, minimum in (("admin", shutdown_s), ("refit-server", grace_s)):
        assert PODS[name]["spec"]["terminationGracePeriodSeconds"] > minimum


def variables(name: str) -> dict[str, str]:
    """Return the environment variables of a pod's container, without secrets."""
    [container] = PODS[name]["spec"]["containers"]
    return {each["name"]: each["value"] for each in container["env"] if "value" in each}


def test_health_check_settings_match_ray_node() -> None:
    settings = {name: value for name, value in variables("head").items() if "health_check" in name}
    script = (ROOT / "docker" / "trainer" / "ray-node").read_text()
    exported = dict(re.findall(r'export (RAY_health_check_\w+)="\$\{\1:-(\d+)\}"', script))
    assert settings == exported


def test_run_is_the_demo_on_the_clusters_nodes() -> None:
    config, demo = load_config(DEPLOY / "run" / "config.yaml"), load_config()
    assert config.policy == demo.policy
    assert config.grpo == demo.grpo
    assert config.refit.control == f"refit-server:{REFIT_PORT}"
    assert config.tracing.endpoint == f"http://admin:{ADMIN_PORT}"
    [admin] = PODS["admin"]["spec"]["containers"]
    assert "--allowed-host=admin" in admin["args"]
    [cluster] = of_kind("RayCluster").values()
    available: set[str] = set()
    for group in cluster["spec"]["workerGroupSpecs"]:
        # The value is quoted twice: a shell removes the outer quotes and the backslashes.
        available |= json.loads(json.loads(group["rayStartParams"]["resources"])).keys()
    placement = config.cluster.placement.model_dump().values()
    assert {name for resources in placement for name in resources} == available
    address = variables("trainer")["RAY_HEAD"]
    assert address == f"{cluster['metadata']['name']}-head-svc:{RAY_PORT}"
    access = config.refit.control_access
    for path in (access.tls_ca, access.token_file):
        assert path is not None
        for name in ("head", "trainers", "generators", "trainer"):
            [container] = PODS[name]["spec"]["containers"]
            mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
            assert str(path.parent) in mounted


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
def test_kustomize_renders_valid_objects(folder: str) -> None:
    rendered = list(yaml.safe_load_all(kustomized(folder)))
    assert len(rendered) >= 3
    for manifest in rendered:
        validate(manifest)
        if manifest["kind"] != "Namespace":
            assert manifest["metadata"]["namespace"] == NAMESPACE


def test_overlays_agree_and_take_images_from_the_registry() -> None:
    rendered = kustomized("overlays/example"), kustomized("overlays/example-run")
    cluster, run = (list(yaml.safe_load_all(text)) for text in rendered)
    [nodes] = [each["spec"] for each in cluster if each["kind"] == "RayCluster"]
    [budget] = [each["spec"] for each in run if each["metadata"]["name"] == "ray"]
    groups = nodes["workerGroupSpecs"]
    assert budget["minAvailable"] == 1 + sum(group["replicas"] for group in groups)
    cluster_images, run_images = (set(re.findall(r"image: (\S+)", text)) for text in rendered)
    assert (len(cluster_images), len(run_images)) == (3, 1)
    assert all(image.startswith("registry.example/") for image in cluster_images)
    assert run_images < cluster_images  # the driver is a node of the same cluster


def test_overlay_mounts_the_alert_rules() -> None:
    [spec] = [
        each["spec"]["template"]["spec"]
        for each in yaml.safe_load_all(kustomized("overlays/example"))
        if (each["kind"], each["metadata"]["name"]) == ("StatefulSet", "admin")
    ]
    [container] = spec["containers"]
    [path] = [
        argument.partition("=")[2]
        for argument in container["args"]
        if argument.startswith("--alert-rules=")
    ]
    [mount] = [each for each in container["volumeMounts"] if each["name"] == "alerts"]
    [volume] = [each for each in spec["volumes"] if each["name"] == "alerts"]
    assert path == f"{mount['mountPath']}/alerts.yaml"
    assert volume["secret"]["secretName"] == "alerts"


def test_overlay_run_uses_all_gpus_of_its_cluster() -> None:
    cluster, run = (
        list(yaml.safe_load_all(kustomized(f"overlays/{name}")))
        for name in ("example", "example-run")
    )
    [nodes] = [each["spec"]["workerGroupSpecs"] for each in cluster if each["kind"] == "RayCluster"]
    gpus = {
        group["groupName"]: group["replicas"]
        * int(group["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
        for group in nodes
    }
    [config_map] = [each for each in run if each["kind"] == "ConfigMap"]
    [job] = [each for each in run if each["kind"] == "Job"]
    mounted = {
        volume["configMap"]["name"]
        for volume in job["spec"]["template"]["spec"]["volumes"]
        if "configMap" in volume
    }
    assert mounted == {config_map["metadata"]["name"]}
    [text] = config_map["data"].values()
    config = yaml.safe_load(text)
    policy = config["policy"]
    assert policy["num_gpus_per_worker"] * policy["data_parallel"] == gpus["trainers"]
    assert policy["generation"]["num_gpus"] == gpus["generators"]
    # Otherwise it equals the configuration in run/.
    policy["num_gpus_per_worker"] = policy["generation"]["num_gpus"] = 0
    assert config == yaml.safe_load((DEPLOY / "run" / "config.yaml").read_text())
    assert (
        load_config(DEPLOY / "overlays" / "example-run" / "config.yaml").policy.data_parallel == 2
    )
