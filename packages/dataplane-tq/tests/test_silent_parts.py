"""Every operation ends at its deadline while a part is stopped, or its packets are dropped.

Needs root, for a network namespace and a firewall rule in it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(map(shutil.which, ("ip", "nft", "unshare"))),
        reason="needs root, and ip, nft and unshare of Debian's iproute2, nftables and util-linux",
    ),
]

SILENCES = [
    "packed/directory/stopped",
    "packed/directory/dropped",
    "packed/unit/stopped",
    "packed/unit/dropped",
    "packed/controller/stopped",
    "simple/simple unit/dropped",
    "packed/gcs/stopped",
    "packed/raylet/stopped",
]
SCRIPT = Path(__file__).with_name("silent_parts.py")
DEADLINE_S = 2.0
NOISE_S = 6.0
"""What a claim waits besides, closing takes, and a busy machine adds."""
TYPED = {"DeadlineExceededError", "UnavailableError", "ClaimTimeoutError"}


@pytest.fixture(scope="module")
def timed(tmp_path_factory):
    result = tmp_path_factory.mktemp("silent") / "result.json"
    inside = 'ip link set lo up && exec "$@"'
    command = ["unshare", "--net", "--", "sh", "-c", inside, "sh", sys.executable, str(SCRIPT)]
    subprocess.run([*command, str(result), *SILENCES], check=True, timeout=420)
    return json.loads(result.read_text())


@pytest.mark.timeout(450)
@pytest.mark.parametrize("silence", SILENCES)
def test_every_operation_ends_at_its_deadline(timed, silence):
    late = {name: end for name, end in timed[silence].items() if end[0] > DEADLINE_S + NOISE_S}
    assert late == {}
    outcomes = {name: end[1] for name, end in timed[silence].items()}
    for name, outcome in outcomes.items():
        assert outcome == "done" or outcome.partition(":")[0] in TYPED, (name, outcome)
    assert outcomes["close the owner"] == "done"


def test_a_claim_that_does_not_block_waits_for_one_answer_alone(timed):
    seconds, outcome = timed["packed/directory/stopped"]["claim"]
    assert outcome.startswith(
        "DeadlineExceededError: claim_meta(partition='p', task='t'): no answer"
    )
    assert seconds < DEADLINE_S + NOISE_S
