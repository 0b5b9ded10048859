"""A publisher in a separate process, which a test may stop or kill."""

from __future__ import annotations

import signal
from pathlib import Path

from integration.vllm.published import Trainer, checkpoint, shards_of
from integration.vllm.server import ForkedProcess

from refit_mx import ControlClient, Deadline, MxV2TrainingPublisher

START_S = 60.0


def publish_from_processes(
    trainer: Trainer, version_id: str, folder: Path, log: Path
) -> list[ForkedProcess]:
    """Publish the weights of a model folder, with one process for each slot of a trainer."""
    slots = [f"fsdp-{slot}" for slot in range(len(trainer.publishers))]
    trainer.control.create_version("tiny", slots, idempotency_key=version_id, version_id=version_id)
    processes = [
        ForkedProcess.start(
            "integration.vllm.publisher_process:publish_until_killed",
            {
                "control_address": trainer.server.address,
                "version_id": version_id,
                "folder": str(folder),
                "slot": slot,
                "slots": len(slots),
            },
            log,
        )
        for slot in range(len(slots))
    ]
    trainer.control.wait_ready(version_id, Deadline(START_S, f"version {version_id}"))
    return processes


def publish_until_killed(
    control_address: str, version_id: str, folder: str, slot: int, slots: int
) -> None:
    """Publish a slot's weights, and serve them until the process is killed."""
    with ControlClient(control_address) as control:
        # A stopped process must count as live until a test resumes it, on a busy machine as well.
        publisher = MxV2TrainingPublisher(
            "tiny", f"fsdp-{slot}", control=control, heartbeat_ttl_s=120.0
        )
        publisher.publish(version_id, shards_of(checkpoint(Path(folder)), slot, slots))
        signal.pause()
