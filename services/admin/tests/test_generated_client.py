"""A client that openapi-python-client generates from the OpenAPI document calls the service.

The generator runs in a separate environment, because it requires older releases of packages here.
"""

import subprocess
import sys
import tomllib
from importlib import import_module

import httpx
import pytest
from integration.environments import ROOT, UV

TOKEN = "3f2b8c0d9e7a6b5c"
GENERATOR = "openapi-python-client@0.29.1"


@pytest.fixture(scope="module")
def generated(running, tmp_path_factory):
    """Generate the client; return the name of its package, which can be imported."""
    folder = tmp_path_factory.mktemp("generated")
    headers = {"authorization": f"Bearer {TOKEN}"}
    document = httpx.get(f"{running.url}/api/v1/openapi.json", headers=headers)
    (folder / "openapi.json").write_bytes(document.raise_for_status().content)
    newest = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]["exclude-newer"]
    tool = [UV, "tool", "run", "--quiet", "--python", sys.executable, "--exclude-newer", newest]
    options = ["--path", "openapi.json", "--output-path", "client", "--fail-on-warning"]
    done = subprocess.run(
        [*tool, GENERATOR, "generate", *options],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
    )
    # It skips an operation that it cannot generate, with a warning.
    assert done.returncode == 0, done.stdout + done.stderr
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder / "client")
        yield "dataplane_admin_client"


def test_every_operation_is_generated_under_its_id(generated, app_of):
    paths = app_of(token=TOKEN, allow_actions=True).openapi()["paths"]
    for path in paths.values():
        for operation in path.values():
            [tag] = operation["tags"]
            module = import_module(f"{generated}.api.{tag}.{operation['operationId']}")
            assert callable(module.sync_detailed)


def test_no_generated_type_is_numbered(generated):
    names = import_module(f"{generated}.models").__all__
    assert len(names) > 50
    assert [name for name in names if name[-1].isdigit()] == []


def test_generated_client_reads_runs_and_a_partition(generated, running):
    client = import_module(generated).AuthenticatedClient(running.url, TOKEN)
    models = import_module(f"{generated}.models")
    history = import_module(f"{generated}.api.history.list_runs")
    runs = history.sync(client=client, state=models.ListRunsState.RUNNING)
    assert [run.run_id for run in runs.runs] == ["tests"]
    live = import_module(f"{generated}.api.live.get_partition")
    partition = live.sync(client=client, id="train")
    assert (partition.id, partition.declared) == ("train", 8)
