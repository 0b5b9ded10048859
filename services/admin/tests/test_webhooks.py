"""Webhooks: signed, retried, in order, once; a dead receiver delays nothing else.

Imports internals: a command of the service in a test's process would not end.
"""

import io
import json
import logging
import re
import socket
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest
import structlog
from alerting import SECRET, Receiver, cleared, evaluate, raised, rule, rules_in, verified
from waiting import TIMEOUT_S, until

from dataplane_admin.alerts import webhooks
from dataplane_admin.cli.shared import log_to_standard_error
from dataplane_admin.store import apply_alerts

RULE = rule("staleness", 4)


@pytest.fixture
def receiver():
    started = Receiver()
    yield started
    started.close()


@pytest.fixture
def alerted(job_of, tmp_path):
    """Start a job and a service with webhooks."""

    def start(**webhooks):
        rules = rules_in(tmp_path, RULE, webhooks=webhooks.items())
        return job_of(alerts=rules, alerts_every_s=0.02)

    return start


def send(job, otlp, value, step, run="run"):
    job.send(otlp.curve([value], run=run, name="rl.staleness.mean", first=step))


def status(job, name="chat"):
    [webhook] = [item for item in job.get("alerts")["webhooks"] if item["name"] == name]
    return webhook


def test_raised_and_cleared_alerts_are_sent_signed(job_of, otlp, receiver, tmp_path):
    job = job_of(
        alerts=rules_in(tmp_path, RULE, webhooks=[("chat", f"{receiver.url}/hook")]),
        alerts_every_s=0.02,
        allowed_hosts=("127.0.0.1", "localhost", "admin.example"),
        # Pages of the first two may only send requests.
        allowed_origins=("https://app.example", "http://localhost:3000", "https://admin.example"),
        root_path="/rl",
    )
    send(job, otlp, 9.0, 0, run="a&<!channel>")
    until(lambda: status(job)["delivered"] == 1)
    send(job, otlp, 1.0, 1, run="a&<!channel>")
    until(lambda: status(job)["delivered"] == 2)
    evaluate(job)
    bodies = [verified(request) for request in receiver.requests]
    assert [body["type"] for body in bodies] == ["alert.raised", "alert.cleared"]
    assert {body["data"]["run"] for body in bodies} == {"a&<!channel>"}
    alert = bodies[0]["data"]
    assert (alert["name"], alert["value"], alert["bound"]) == ("staleness", 9.0, 4.0)
    url = "https://admin.example/rl/run?run=a%26%3C%21channel%3E"
    assert {body["url"] for body in bodies} == {url}
    time_s = datetime.fromtimestamp(alert["raised_ns"] // 10**9, UTC)
    subject = "for run a&amp;&lt;!channel&gt;"
    figures = f"9, bound 4, since {time_s:%Y-%m-%d %H:%M:%S} UTC. {url}"
    assert [body["text"] for body in bodies] == [
        f"staleness (warning) raised {subject}: the mean staleness is 9 versions at the newest "
        f"step; value {figures}",
        f"staleness (warning) cleared {subject}: within the bound: the mean staleness is 1 "
        f"versions at the newest step; value before clearing {figures}",
    ]
    assert status(job) == {
        "name": "chat", "pending": 0, "error": "", "delivered": 2, "failed": 0, "dropped": 0
    }  # fmt: skip


def test_the_function_of_the_docs_verifies_a_request(alerted, otlp, receiver):
    page = Path(__file__).parents[3] / "docs/recipes/alerts.md"
    [text] = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    names = {}
    exec(text, names)
    job = alerted(chat=receiver.url)
    send(job, otlp, 9.0, 0)
    until(lambda: status(job)["delivered"] == 1)
    [(_, headers, body)] = receiver.requests
    headers = {name.lower(): value for name, value in headers.items()}
    assert names["verify"](SECRET, headers, body)
    assert "url" not in json.loads(body), "the address of the service is unknown"
    assert not names["verify"](SECRET, headers, body + b" ")
    old = {**headers, "webhook-timestamp": "1700000000"}
    assert not names["verify"](SECRET, old, body)


def test_a_failed_notification_is_retried_until_accepted(alerted, otlp, receiver):
    receiver.statuses = [500, 429]
    job = alerted(chat=receiver.url)
    send(job, otlp, 9.0, 0)
    assert until(lambda: status(job)["error"]) == "answered with status 500"
    until(lambda: status(job)["delivered"] == 1)
    evaluate(job)
    assert receiver.events() == [("alert.raised", "run")] * 3
    ids = {headers["webhook-id"] for _, headers, _ in receiver.requests}
    assert len(ids) == 1, "a receiver recognizes what it has received"
    assert status(job)["failed"] == 2
    assert status(job)["pending"] == 0
    metrics = job.client.get("/metrics").text
    assert 'dataplane_admin_webhook_failures_total{webhook="chat"} 2.0' in metrics


class WithoutReader(io.StringIO):
    def write(self, text):
        raise BrokenPipeError


def test_a_broken_standard_error_ends_no_retries(alerted, otlp, receiver, monkeypatch):
    receiver.statuses = [500]
    monkeypatch.setattr(sys, "stderr", WithoutReader())
    log_to_standard_error()
    try:
        job = alerted(chat=receiver.url)
        send(job, otlp, 9.0, 0)
        until(lambda: status(job)["delivered"] == 1)
    finally:
        structlog.reset_defaults()


def test_a_redirect_is_not_followed(alerted, otlp, receiver):
    receiver.statuses = [302, 307]
    job = alerted(chat=f"{receiver.url}/hook")
    send(job, otlp, 9.0, 0)
    until(lambda: status(job)["delivered"] == 1)
    assert {path for path, _, _ in receiver.requests} == {"/hook"}
    assert status(job)["failed"] == 2


def test_a_dead_receiver_delays_neither_alerts_nor_others(alerted, otlp, receiver):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        job = alerted(dead=f"http://127.0.0.1:{silent.getsockname()[1]}", chat=receiver.url)
        send(job, otlp, 9.0, 0)
        connection, _ = silent.accept()  # it never answers
        with connection:
            until(lambda: status(job)["delivered"] == 1)
            send(job, otlp, 1.0, 1)
            until(lambda: cleared(job) == [("staleness", "run")])
            until(lambda: status(job)["delivered"] == 2)
            assert status(job, "dead")["pending"] == 2


def test_an_attempt_does_not_wait_for_a_hung_name_resolution(alerted, otlp, monkeypatch):
    ended, late = threading.Event(), []
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda *_, **__: late.append(ended.wait(4 * TIMEOUT_S))
    )
    monkeypatch.setattr(webhooks, "_ATTEMPT_S", 0.2)
    try:
        job = alerted(chat="http://hung.example/")
        send(job, otlp, 9.0, 0)
        assert until(lambda: status(job)["error"]) == "no answer within 0.2 s"
        assert late == []
    finally:
        ended.set()


def test_a_notification_is_dropped_an_hour_after_its_alert_ended(alerted, otlp, receiver, later):
    receiver.statuses = [500] * 100
    job = alerted(chat=receiver.url)
    job.send(otlp.run("started"))
    send(job, otlp, 9.0, 0)
    until(lambda: status(job)["failed"] == 1)
    later(4_000)
    evaluate(job)
    assert (status(job)["pending"], status(job)["dropped"]) == (1, 0)
    send(job, otlp, 1.0, 1)
    until(lambda: status(job)["dropped"] == 1)
    later(4_000)
    until(lambda: status(job)["dropped"] == 2)
    assert (status(job)["pending"], status(job)["delivered"]) == (0, 0)


def test_a_notification_that_is_refused_delays_no_other(alerted, otlp, receiver):
    receiver.statuses = [400]
    job = alerted(chat=receiver.url)
    send(job, otlp, 9.0, 0)
    until(lambda: status(job)["dropped"] == 1)
    send(job, otlp, 1.0, 1)
    until(lambda: status(job)["delivered"] == 1)
    assert receiver.events()[-1] == ("alert.cleared", "run")


def test_notifications_beyond_the_maximum_are_counted(alerted, otlp, receiver, monkeypatch):
    monkeypatch.setattr(apply_alerts, "MAX_NOTIFICATIONS", 1)
    receiver.statuses = [500] * 100
    job = alerted(chat=receiver.url)
    send(job, otlp, 9.0, 0)
    until(lambda: status(job)["pending"] == 1)
    send(job, otlp, 9.0, 0, run="other")
    until(lambda: status(job)["dropped"] == 1)
    metrics = job.client.get("/metrics").text
    assert 'dataplane_admin_webhook_dropped_total{webhook="chat"} 1.0' in metrics


def test_notifications_of_a_removed_webhook_expire(alerted, otlp, receiver, later, monkeypatch):
    monkeypatch.setattr(apply_alerts, "MAX_NOTIFICATIONS", 1)
    receiver.statuses = [500] * 100
    first = alerted(removed=receiver.url)
    first.send(otlp.run("started"))
    send(first, otlp, 9.0, 0)
    until(lambda: status(first, "removed")["failed"] == 1)
    first.__exit__(None, None, None)
    receiver.statuses = []
    second = alerted(chat=receiver.url)
    send(second, otlp, 1.0, 1)
    until(lambda: not raised(second))
    later(4_000)
    evaluate(second)
    send(second, otlp, 9.0, 2)
    until(lambda: status(second)["delivered"] == 1)


def test_a_restart_neither_repeats_nor_loses_notifications(alerted, otlp, receiver):
    first = alerted(chat=receiver.url)
    send(first, otlp, 9.0, 0)
    until(lambda: status(first)["delivered"] == 1)
    first.__exit__(None, None, None)
    second = alerted(chat=receiver.url)
    send(second, otlp, 8.0, 1)
    evaluate(second)
    assert raised(second) == [("staleness", "run")]
    assert len(receiver.requests) == 1
    send(second, otlp, 1.0, 2)
    until(lambda: status(second)["delivered"] == 1)
    assert receiver.events() == [("alert.raised", "run"), ("alert.cleared", "run")]


def test_a_pending_notification_survives_a_restart(alerted, otlp, receiver):
    receiver.statuses = [500]
    first = alerted(chat=receiver.url)
    send(first, otlp, 9.0, 0)
    until(lambda: status(first)["failed"] == 1)
    first.__exit__(None, None, None)
    second = alerted(chat=receiver.url)
    until(lambda: status(second)["pending"] == 0)
    assert set(receiver.events()) == {("alert.raised", "run")}
    assert len(receiver.requests) == 2


def test_secret_and_address_are_shown_nowhere(alerted, otlp, capsys, caplog):
    with caplog.at_level(logging.DEBUG):
        job = alerted(chat="http://127.0.0.1:9/path-with-a-secret")
        send(job, otlp, 9.0, 0)
        error = until(lambda: status(job)["error"])
    shown = [error, caplog.text, *capsys.readouterr()]
    shown += [job.client.get(path).text for path in ("/alerts", "/api/v1/alerts", "/metrics")]
    for text in shown:
        assert "path-with-a-secret" not in text
        assert SECRET not in text
