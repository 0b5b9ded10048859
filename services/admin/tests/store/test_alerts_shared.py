"""Alerts of several services on one database: one evaluates, and each notification is sent once."""

import pytest
from alerting import Receiver, cleared, evaluate, raised, rule, rules_in
from waiting import until

RUNS = [f"run-{number}" for number in range(5)]


@pytest.fixture
def services(url, job_of, tmp_path):
    """Return a receiver and a function that starts services on one database."""
    receiver = Receiver()
    rules = rules_in(tmp_path, rule("staleness", 4), webhooks=[("chat", receiver.url)])
    yield receiver, lambda: job_of(store_url=url, alerts=rules, alerts_every_s=0.02)
    receiver.close()


def send(job, otlp, value, step):
    for run in RUNS:
        job.send(otlp.curve([value], run=run, name="rl.staleness.mean", first=step))


def delivered(jobs):
    return sum(job.get("alerts")["webhooks"][0]["delivered"] for job in jobs)


def test_two_services_send_each_notification_once(services, otlp):
    receiver, start = services
    jobs = [start(), start()]
    send(jobs[0], otlp, 9.0, 0)
    until(lambda: delivered(jobs) == len(RUNS))
    send(jobs[1], otlp, 1.0, 1)
    until(lambda: delivered(jobs) == 2 * len(RUNS))
    evaluate(next(job for job in jobs if job.get("alerts")["evaluated_ns"]))
    events = receiver.events()
    assert sorted(events) == sorted(
        (kind, run) for kind in ("alert.raised", "alert.cleared") for run in RUNS
    )
    assert (
        sorted(cleared(jobs[0])) == sorted(cleared(jobs[1])) == [("staleness", run) for run in RUNS]
    )


def test_another_service_continues_when_one_ends(services, otlp):
    receiver, start = services
    first, second = start(), start()
    send(second, otlp, 9.0, 0)
    until(lambda: len(raised(second)) == len(RUNS))
    until(lambda: delivered([first, second]) == len(RUNS))
    evaluating = first if first.get("alerts")["evaluated_ns"] else second
    other = second if evaluating is first else first
    evaluating.__exit__(None, None, None)
    evaluate(other)
    send(other, otlp, 1.0, 1)
    until(lambda: raised(other) == [])
    until(lambda: len(receiver.requests) == 2 * len(RUNS))


def test_another_service_takes_over_from_a_killed_one(services, otlp, later, monkeypatch):
    _, start = services
    first = start()
    evaluate(first)
    # A killed service does not release the lease.
    watch = first.app.state.service.watch
    monkeypatch.setattr(watch, "_hold", lambda _seconds: False)
    second = start()
    send(second, otlp, 9.0, 0)
    assert second.get("alerts")["evaluated_ns"] is None
    later(40)
    until(lambda: len(raised(second)) == len(RUNS))
