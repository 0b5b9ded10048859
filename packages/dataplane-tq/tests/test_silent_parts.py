"""Operations while a part is stopped, or its packets are dropped.

Needs root, for a network namespace with a firewall rule.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from integration.lean_ray import LEAN, LEAN_ENVIRONMENT

from dataplane_tq.storage import BACKENDS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.debian("iproute2", "nftables"),
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(map(shutil.which, ("ip", "nft", "unshare"))),
        reason="needs root, and ip, nft and unshare of Debian's iproute2, nftables and util-linux",
    ),
]

SILENCES = {
    "packed": [
        "directory/stopped",
        "directory/dropped",
        "unit/stopped",
        "unit/dropped",
    ],
    "packed with Ray": ["controller/stopped", "gcs/stopped", "raylet/stopped"],
    "simple": ["simple unit/dropped"],
    "mooncake_cpu": ["master/stopped", "master/dropped", "segment/stopped", "segment/dropped"],
    "yuanrong": ["worker/stopped", "worker/dropped"],
}
SCRIPT = Path(__file__).with_name("silent_parts.py")
DEADLINE_S = 2.0
NOISE_S = 10.0
"""Additional time for claims, for closing, and for a busy machine."""
TYPED = {"DeadlineExceededError", "UnavailableError", "ClaimTimeoutError"}


@pytest.fixture(
    scope="module",
    params=[
        # Each of the others takes minutes.
        pytest.param(name, marks=() if name == "packed" else pytest.mark.long)
        for name in ("packed with Ray", *BACKENDS)
    ],
)
def silenced(request):
    return request.param


@pytest.fixture(scope="module")
def backend(silenced, require_backend):
    return require_backend(silenced.partition(" ")[0])


@pytest.fixture(scope="module")
def timed(backend, silenced, tmp_path_factory):
    result = tmp_path_factory.mktemp("silent") / "result.json"
    inside = 'ip link set lo up && exec "$@"'
    command = ["unshare", "--net", "--", "sh", "-c", inside, "sh", *LEAN, str(SCRIPT)]
    silences = [
        f"{backend}/{silence}" for silence in SILENCES.get(silenced, ["controller/stopped"])
    ]
    environment = {**os.environ, **LEAN_ENVIRONMENT}
    subprocess.run([*command, str(result), *silences], check=True, timeout=600, env=environment)
    return json.loads(result.read_text())


@pytest.mark.timeout(650)
def test_every_operation_ends_at_its_deadline(timed):
    ends = {(part, name): end for part, outcomes in timed.items() for name, end in outcomes.items()}
    assert {each: end for each, end in ends.items() if end[0] > DEADLINE_S + NOISE_S} == {}
    for (part, name), (_, outcome) in ends.items():
        kind = outcome.partition(":")[0]
        assert outcome == "done" or (kind in TYPED and name != "close the owner"), (
            part,
            name,
            outcome,
        )


@pytest.mark.parametrize("silenced", ["packed"], indirect=True, scope="module")
def test_nonblocking_claim_ends_at_its_deadline(timed):
    seconds, outcome = timed["packed/directory/stopped"]["claim"]
    assert outcome.startswith(
        "DeadlineExceededError: claim_meta(partition='p', task='t'): no answer"
    )
    assert seconds < DEADLINE_S + NOISE_S
