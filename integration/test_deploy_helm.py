"""The Helm charts render the Kubernetes manifests, and the admin service of these alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from integration.test_deploy_kubernetes import NAMESPACE, ROOT, Object, kustomized, validate

CHART = ROOT / "deploy" / "helm" / "dataplane-admin"
ALL_SERVICES = ROOT / "deploy" / "helm" / "rl-dataplane"
RENDER = """
import json, sys
import helm_python

chart, name, namespace, values = sys.argv[1:]
with helm_python.Chart.load(chart) as loaded:
    print(json.dumps(loaded.render(json.loads(values), name=name, namespace=namespace)))
"""


def run_helm(
    name: str, namespace: str, values: Object, chart: Path = CHART
) -> subprocess.CompletedProcess[str]:
    """Render a chart with Helm's own code, in a process of its Go runtime."""
    if find_spec("helm_python") is None:
        pytest.skip("needs the package helm-python-sdk, Helm as a wheel for x86-64")
    command = [sys.executable, "-c", RENDER, str(chart), name, namespace, json.dumps(values)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def render_chart(
    name: str, namespace: str, values: Object, chart: Path = CHART
) -> dict[tuple[str, str], Object]:
    """Return a chart's objects by kind and name."""
    done = run_helm(name, namespace, values, chart)
    assert done.returncode == 0, done.stderr
    manifests = [
        manifest
        for text in json.loads(done.stdout).values()
        for manifest in yaml.safe_load_all(text)
        if manifest is not None  # a file of definitions
    ]
    objects = by_kind_and_name(manifests)
    assert len(objects) == len(manifests)
    return objects


def by_kind_and_name(manifests: Iterable[Object]) -> dict[tuple[str, str], Object]:
    return {(each["kind"], each["metadata"]["name"]): each for each in manifests}


def test_chart_renders_the_admin_service_of_base() -> None:
    base = by_kind_and_name(
        manifest
        for manifest in yaml.safe_load_all(kustomized("base"))
        if manifest["metadata"]["name"] == "admin"
    )
    assert base.keys() == {(kind, "admin") for kind in ("NetworkPolicy", "Service", "StatefulSet")}
    assert render_chart("admin", NAMESPACE, {}) == base


def test_chart_of_all_services_renders_base() -> None:
    base = by_kind_and_name(yaml.safe_load_all(kustomized("base")))
    del base["Namespace", NAMESPACE]  # an installation of Helm is into an existing one
    assert render_chart("any", NAMESPACE, {}, ALL_SERVICES) == base


def test_chart_of_all_services_renders_the_example_overlay() -> None:
    values = yaml.safe_load(
        """
        runs: {storageClassName: shared-files}
        ray:
          image: registry.example/rl-dataplane/grpo-trainer:0.1.0
          groups:
            - name: trainers
              replicas: 2
              resources: &gpu
                requests: {cpu: "4", memory: 8Gi}
                limits: {memory: 8Gi, nvidia.com/gpu: "1"}
            - {name: generators, replicas: 1, resources: *gpu}
        refitServer: {image: "registry.example/rl-dataplane/refit-server:0.1.0"}
        admin:
          image: registry.example/rl-dataplane/dataplane-admin:0.1.0
          allowedHosts: [rl.example]
          alertsSecret: alerts
        """
    )
    overlay = by_kind_and_name(yaml.safe_load_all(kustomized("overlays/example")))
    del overlay["Namespace", NAMESPACE]
    assert render_chart("any", NAMESPACE, values, ALL_SERVICES) == overlay


def test_groups_of_ray_are_placed_on_nodes() -> None:
    tolerations = [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    group = {"name": "g", "replicas": 3, "resources": {}, "nodeSelector": {"gpu": "h200"}}
    values = {
        "ray": {"groups": [{**group, "tolerations": tolerations}]},
        "refitServer": {"size": "2Gi", "resources": {"limits": {"memory": "1Gi"}}},
        "runs": {"size": "1Ti"},
        "admin": {"name": "watch", "tokenSecret": "access"},
    }
    objects = render_chart("any", NAMESPACE, values, ALL_SERVICES)
    for manifest in objects.values():
        validate(manifest)
    [rendered] = objects["RayCluster", "rl"]["spec"]["workerGroupSpecs"]
    pod = rendered["template"]["spec"]
    assert (rendered["groupName"], rendered["maxReplicas"]) == ("g", 3)
    assert (pod["nodeSelector"], pod["tolerations"]) == ({"gpu": "h200"}, tolerations)
    [secret] = [each["valueFrom"] for each in pod["containers"][0]["env"] if "valueFrom" in each]
    assert secret["secretKeyRef"]["name"] == "access"
    assert objects["PersistentVolumeClaim", "runs"]["spec"]["resources"]["requests"] == {
        "storage": "1Ti"
    }
    server = objects["StatefulSet", "refit-server"]["spec"]
    assert server["template"]["spec"]["containers"][0]["resources"]["limits"]["memory"] == "1Gi"
    [claim] = server["volumeClaimTemplates"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "2Gi"
    peers = objects["NetworkPolicy", "cluster"]["spec"]["egress"][-1]["to"]
    assert peers == [{"podSelector": {"matchLabels": {"app.kubernetes.io/name": "watch"}}}]
    assert ("StatefulSet", "watch") in objects


def test_chart_puts_every_value_into_its_object() -> None:
    values = {
        "name": "watch",
        "image": "registry.example/admin@sha256:1234",
        "tokenSecret": "access",
        "alertsSecret": "rules",
        "allowedHosts": ["rl.example", "10.1.2.3"],
        "env": [{"name": "DATAPLANE_ADMIN_SERVE_RUN_DAYS", "value": "365"}],
        "storage": {"size": "2Ti", "retentionBytes": 2**40},
        "resources": {"requests": {"cpu": 2, "memory": "2Gi"}, "limits": {"memory": "8Gi"}},
    }
    assert values.keys() == yaml.safe_load((CHART / "values.yaml").read_text()).keys()
    objects = render_chart("admin", NAMESPACE, values)
    for manifest in objects.values():
        validate(manifest)
    spec = objects["StatefulSet", "watch"]["spec"]
    [container] = spec["template"]["spec"]["containers"]
    assert container["image"] == values["image"]
    assert container["resources"] == values["resources"]
    assert container["env"] == values["env"]
    assert container["args"][-3:] == [
        "--allowed-host=rl.example",
        "--allowed-host=10.1.2.3",
        "--alert-rules=/run/secrets/alerts/alerts.yaml",
    ]
    assert "/run/secrets/alerts" in {mount["mountPath"] for mount in container["volumeMounts"]}
    assert "--retention-bytes=1099511627776" in container["args"]
    [claim] = spec["volumeClaimTemplates"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "2Ti"
    assert {"access", "rules"} <= {
        volume["secret"]["secretName"]
        for volume in spec["template"]["spec"]["volumes"]
        if "secret" in volume
    }


def test_chart_names_objects_after_its_release() -> None:
    objects = render_chart("watch", "other", {})
    labels = {"app.kubernetes.io/name": "watch"}
    for manifest in objects.values():
        assert manifest["metadata"]["name"] == "watch"
        assert manifest["metadata"]["namespace"] == "other"
    spec = objects["StatefulSet", "watch"]["spec"]
    assert spec["serviceName"] == "watch"
    assert spec["template"]["metadata"]["labels"] == spec["selector"]["matchLabels"] == labels
    assert objects["Service", "watch"]["spec"]["selector"] == labels
    assert objects["NetworkPolicy", "watch"]["spec"]["podSelector"]["matchLabels"] == labels
    [container] = spec["template"]["spec"]["containers"]
    assert [word for word in container["args"] if word.startswith("--allowed-host=")] == [
        f"--allowed-host=watch{end}"
        for end in ("", ".other", ".other.svc", ".other.svc.cluster.local")
    ]


@pytest.mark.parametrize(
    ("chart", "values", "reason"),
    [
        (CHART, {"storage": {"retentionBytes": "16Gi"}}, "got string, want integer"),
        (CHART, {"tokensecret": "access"}, "'tokensecret' not allowed"),
        (ALL_SERVICES, {"admin": {"tokensecret": "access"}}, "'tokensecret' not allowed"),
        (ALL_SERVICES, {"ray": {"groups": [{"name": "trainers"}]}}, "'replicas', 'resources'"),
    ],
)
def test_chart_refuses_invalid_values(chart: Path, values: Object, reason: str) -> None:
    done = run_helm("admin", NAMESPACE, values, chart)
    assert done.returncode != 0
    assert reason in done.stderr
