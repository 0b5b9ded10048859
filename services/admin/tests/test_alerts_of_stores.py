"""Alerts about the disk and storage units: what is unknown neither raises nor clears one."""

import shutil

from alerting import cleared, evaluate, raised, rule
from waiting import until

from dataplane_core import InMemoryDataPlaneClient, StorageSummary, UnavailableError

PLANE = {"enabled": True, "impl": "in_memory"}


def test_a_full_disk_is_raised_and_cleared(alerted, monkeypatch):
    usage = shutil.disk_usage("/")
    job = alerted(rule("store_full", 0.9))
    evaluate(job)
    assert raised(job) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1_000))
    [alert] = until(lambda: job.get("alerts")["raised"])
    assert (alert["subject"], alert["run_id"]) == ("telemetry", "")
    monkeypatch.undo()
    until(lambda: cleared(job) == [("store-full", "")])


class Plane(InMemoryDataPlaneClient):
    """A data plane with one storage unit of 100 bytes."""

    used, reachable, name = 10, True, "unit"

    @property
    def inspector(self):
        inspector = super().inspector
        inspector.list_storage = self._list_storage
        return inspector

    def _list_storage(self):
        if not self.reachable:
            raise UnavailableError("unit: no answer")
        free = 100 - self.used
        return [StorageSummary(name=self.name, node="n", capacity=100, used=self.used, free=free)]


def test_a_full_storage_unit_is_raised_and_cleared(alerted):
    with Plane(PLANE) as plane:
        job = alerted(rule("store_full", 0.9), inspector=plane.inspector, poll_s=0.05)
        plane.used = 95
        [alert] = until(lambda: job.get("alerts")["raised"])
        assert (alert["subject"], alert["value"]) == ("storage unit unit", 0.95)
        assert alert["sentence"] == "storage unit unit is 95 % full"
        plane.reachable = False
        until(lambda: job.get("partitions")["storage_error"])
        evaluate(job)
        assert raised(job), "an unreachable unit does not clear its alerts"
        plane.used, plane.reachable = 50, True
        until(lambda: cleared(job) == [("store-full", "")])


def test_a_storage_unit_may_have_any_name(alerted):
    with Plane(PLANE) as plane:
        plane.name, plane.used = "telemetry", 95
        job = alerted(rule("store_full", 0.9), inspector=plane.inspector, poll_s=0.05)
        [alert] = until(lambda: job.get("alerts")["raised"])
        assert alert["sentence"] == "storage unit telemetry is 95 % full"


def test_an_alert_survives_a_restart_while_units_do_not_answer(alerted):
    with Plane(PLANE) as plane:
        plane.used = 95
        job = alerted(rule("store_full", 0.9), inspector=plane.inspector, poll_s=0.05)
        until(lambda: raised(job))
        plane.reachable = False
        job.__exit__(None, None, None)
        job = alerted(rule("store_full", 0.9), inspector=plane.inspector, poll_s=0.05)
        until(lambda: job.get("partitions")["storage_error"])
        evaluate(job)
        assert raised(job) == [("store-full", "")]
        plane.used, plane.reachable = 50, True
        until(lambda: cleared(job) == [("store-full", "")])
