"""Versions of a refit in the control plane, with workers in this process.

Imports internals: a run does not show single versions.
"""

from __future__ import annotations

import pytest
import torch

from grpo_trainer.config.sections import RefitSection
from grpo_trainer.errors import WorkerError
from grpo_trainer.refit import weight_sync
from grpo_trainer.refit.source import RefitSource
from grpo_trainer.refit.target import RefitTarget
from grpo_trainer.refit.weight_sync import RefitWeightSync
from refit_mx.control import VersionState

SOURCES, TARGET = ["source 0", "source 1"], "target"


def weights(version):
    return {"w": torch.arange(24.0).view(6, 4) + version}


class Calls:
    """Calls to workers in this process, instead of those to Ray's actors."""

    def __init__(self):
        self.refits, self.live, self.failing = {}, {"w": torch.zeros(6, 4)}, set()

    def each(self, method, arguments):
        return {
            name: getattr(self, method)(name, *args, **kwargs)
            for name, (args, kwargs) in arguments.items()
        }

    def node_address(self, name):
        return "here"

    def join_refit(self, name, settings):
        if name == TARGET:
            self.refits[name] = RefitTarget(settings, self.live)
        else:
            rank = SOURCES.index(name)
            self.refits[name] = RefitSource(settings, rank=rank, world=len(SOURCES))

    def publish_weights(self, name, version_id, carrier):
        if name in self.failing:
            raise WorkerError(f"{name} failed")
        self.refits[name].publish(version_id, weights(weight_sync.version_number(version_id)))

    def install_weights(self, name, version_id, carrier):
        self.refits[name].refit(version_id)


@pytest.fixture
def calls(monkeypatch):
    monkeypatch.setattr(weight_sync, "node_address", lambda: "here")
    calls = Calls()
    yield calls
    for each in calls.refits.values():
        each.close()


def test_version_of_a_failed_publish_is_released(calls):
    config = RefitSection.model_validate(
        {
            "control": None,
            "control_access": dict.fromkeys(("tls_ca", "tls_name", "token_file", "token_env")),
            "host": "127.0.0.1",
            "advertised_host": None,
            "transport": "tcp",
            "generation_tensor_parallel": 1,
            "timeout_s": 30.0,
        }
    )
    sync = RefitWeightSync(calls, config, name="m", sources=SOURCES, targets=[TARGET])
    try:
        sync.sync(1)
        calls.failing.add("source 1")
        for _ in range(3):
            with pytest.raises(WorkerError, match="source 1 failed"):
                sync.sync(2)
            assert sync._control.get_version(sync._begun).state is VersionState.RELEASING
        # The served version stays readable meanwhile, for a generator that restarts.
        assert sync._control.get_version(sync._published).state is VersionState.READY
        calls.failing.clear()
        sync.sync(2)
    finally:
        sync.close()
    assert torch.equal(calls.live["w"], weights(2)["w"])
