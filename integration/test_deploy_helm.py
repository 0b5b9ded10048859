"""The Helm chart renders the admin service of the Kubernetes manifests."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest
import yaml
from integration.test_deploy_kubernetes import NAMESPACE, ROOT, Object, kustomized, validate

CHART = ROOT / "deploy" / "helm" / "dataplane-admin"
RENDER = """
import json, sys
import helm_python

chart, name, namespace, values = sys.argv[1:]
with helm_python.Chart.load(chart) as loaded:
    print(json.dumps(loaded.render(json.loads(values), name=name, namespace=namespace)))
"""


def run_helm(name: str, namespace: str, values: Object) -> subprocess.CompletedProcess[str]:
    """Render the chart with Helm's own code, in a process of its Go runtime."""
    if find_spec("helm_python") is None:
        pytest.skip("needs the package helm-python-sdk, Helm as a wheel for x86-64")
    command = [sys.executable, "-c", RENDER, str(CHART), name, namespace, json.dumps(values)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def render_chart(name: str, namespace: str, values: Object) -> dict[str, Object]:
    """Return the chart's objects by kind."""
    done = run_helm(name, namespace, values)
    assert done.returncode == 0, done.stderr
    manifests = [
        manifest
        for text in json.loads(done.stdout).values()
        for manifest in yaml.safe_load_all(text)
    ]
    objects = {manifest["kind"]: manifest for manifest in manifests}
    assert len(objects) == len(manifests)
    return objects


def test_chart_renders_the_admin_service_of_base() -> None:
    base = {
        manifest["kind"]: manifest
        for manifest in yaml.safe_load_all(kustomized("base"))
        if manifest["metadata"]["name"] == "admin"
    }
    assert base.keys() == {"NetworkPolicy", "Service", "StatefulSet"}
    assert render_chart("admin", NAMESPACE, {}) == base


def test_chart_puts_every_value_into_its_object() -> None:
    values = {
        "image": "registry.example/admin@sha256:1234",
        "tokenSecret": "access",
        "alertsSecret": "rules",
        "allowedHosts": ["rl.example", "10.1.2.3"],
        "storage": {"size": "2Ti", "retentionBytes": 2**40},
        "resources": {"requests": {"cpu": 2, "memory": "2Gi"}, "limits": {"memory": "8Gi"}},
    }
    assert values.keys() == yaml.safe_load((CHART / "values.yaml").read_text()).keys()
    objects = render_chart("admin", NAMESPACE, values)
    for manifest in objects.values():
        validate(manifest)
    spec = objects["StatefulSet"]["spec"]
    [container] = spec["template"]["spec"]["containers"]
    assert container["image"] == values["image"]
    assert container["resources"] == values["resources"]
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
    spec = objects["StatefulSet"]["spec"]
    assert spec["serviceName"] == "watch"
    assert spec["template"]["metadata"]["labels"] == spec["selector"]["matchLabels"] == labels
    assert objects["Service"]["spec"]["selector"] == labels
    assert objects["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == labels
    [container] = spec["template"]["spec"]["containers"]
    assert [word for word in container["args"] if word.startswith("--allowed-host=")] == [
        f"--allowed-host=watch{end}"
        for end in ("", ".other", ".other.svc", ".other.svc.cluster.local")
    ]


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"storage": {"retentionBytes": "16Gi"}}, "got string, want integer"),
        ({"tokensecret": "access"}, "'tokensecret' not allowed"),
    ],
)
def test_chart_refuses_invalid_values(values: Object, reason: str) -> None:
    done = run_helm("admin", NAMESPACE, values)
    assert done.returncode != 0
    assert reason in done.stderr
