"""`Watch`: a thread that evaluates the rules, stores the alerts and queues notifications.

If several services share a database, only the holder of a lease evaluates. It renews the lease at
each evaluation and releases it when it stops.
"""

from __future__ import annotations

import json
import math
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from html import escape
from urllib.parse import quote

import structlog

from dataplane_admin import models
from dataplane_admin.alerts.evaluate import Decision, Facts, Key, Measure, decide
from dataplane_admin.alerts.rules import FRACTIONS, SECONDS, AlertRules
from dataplane_admin.alerts.webhooks import Sender
from dataplane_admin.store import Batch, Store, StoreError
from dataplane_admin.store.apply_alerts import (
    apply_alerts,
    drop_expired,
    hold_lease,
    is_holder,
    message_of,
)
from dataplane_admin.store.read_alerts import MAX_RAISED
from dataplane_admin.store.work import Work
from observability.views.printable import printable
from observability.views.quantities import duration

_MIN_LEASE_S = 30.0
_STOP_S = 5.0

logger = structlog.get_logger("dataplane_admin")


class Watch:
    """Thread that evaluates the rules until closed, and the senders of the webhooks."""

    def __init__(
        self,
        store: Store,
        rules: AlertRules,
        facts: Callable[[], Facts],
        *,
        every_s: float,
        public_url: str | None = None,
    ) -> None:
        self.rules = rules
        self.senders = [Sender(store, webhook) for webhook in rules.webhooks]
        self.failures = 0
        self.idle_rules: Sequence[str] = ()
        self.evaluated_ns: int | None = None
        self._store = store
        self._facts = facts
        self._every_s = every_s
        self._public_url = public_url
        self._holder = secrets.token_hex(8)
        self._since: Mapping[Key, int] = {}
        self._evaluated_s = -math.inf
        self._failing = False
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="alerts", daemon=True)

    def start(self) -> None:
        """Start evaluating and sending."""
        self._thread.start()
        for sender in self.senders:
            sender.start()

    def close(self) -> None:
        """Stop; wait a few seconds for a running evaluation and running attempts."""
        self._ending.set()
        for sender in self.senders:
            sender.close()
        for sender in self.senders:
            sender.join()
        if self._thread.ident is not None:
            self._thread.join(_STOP_S)

    def _run(self) -> None:
        while True:
            try:
                self._evaluate()
                self._failing = False
            except Exception as error:  # the thread must continue, and the service with it
                self.failures += 1
                if not self._failing:
                    self._failing = True
                    # A store that does not answer needs no traceback.
                    unknown = not isinstance(error, StoreError)
                    logger.error("alerts_not_evaluated", reason=str(error)[:300], exc_info=unknown)
            if self._ending.wait(self._every_s):
                break
        try:
            # Release the lease: another service, or this one after a restart, continues at once.
            self._hold(0.0)
        except StoreError:
            logger.warning("alert_lease_not_released")

    def _hold(self, seconds: float) -> bool:
        """Drop expired notifications, and acquire or renew the lease; return whether it is held."""
        held, dropped = [], []

        def hold(work: Work) -> bool:
            held.append(hold_lease(work, self._holder, work.now_ns + int(seconds * 1e9)))
            dropped.append(drop_expired(work))
            return bool(dropped[-1])

        self._store.write(Batch(changes=(hold,)))
        self._count_dropped(dropped[-1])
        return held[-1]

    def _evaluate(self) -> None:
        lease_s = max(_MIN_LEASE_S, 3 * self._every_s)
        if not self._hold(lease_s):
            self._since = {}
            self.idle_rules = ()
            return
        facts = self._facts()
        raised = self._store.raised_alerts()
        now_s = time.monotonic()
        if now_s - self._evaluated_s > lease_s:
            self._since = {}  # after such a gap, it is unknown whether a condition lasted
        decision = decide(self.rules.rules, facts, raised, self._since)
        free = max(0, MAX_RAISED - len(raised))
        decision = replace(decision, raised=decision.raised[:free])
        alerts = _changed(decision, facts.now_ns)
        if alerts:
            self._save(decision, alerts)
        self._since = decision.since
        self.idle_rules = decision.idle_rules
        self.evaluated_ns = facts.now_ns
        self._evaluated_s = now_s

    def _save(self, decision: Decision, alerts: Sequence[tuple[models.Alert, str]]) -> None:
        dropped = [Counter[str]()]

        def change(work: Work) -> bool:
            if not is_holder(work, self._holder):
                return False
            dropped.append(apply_alerts(work, alerts, self._notifications))
            return bool(decision.raised or decision.cleared)

        self._store.write(Batch(changes=(change,)))
        self._count_dropped(dropped[-1])

    def _count_dropped(self, dropped: Counter[str]) -> None:
        if dropped:
            logger.warning("notifications_dropped", count=dropped.total())
        for sender in self.senders:
            sender.sent.dropped += dropped[sender.webhook.name]

    def _notifications(self, alert: models.Alert, reason: str) -> Sequence[tuple[str, str, str]]:
        """Return webhook, message id and body of each notification about an alert."""
        event = "raised" if alert.cleared_ns is None else "cleared"
        facts = alert.model_dump() | {"reason": reason}
        facts["run"] = facts.pop("run_id")
        text, link = _text(alert, reason), {}
        if self._public_url is not None:
            run = quote(alert.run_id, safe="", errors="backslashreplace")
            url = f"{self._public_url}{f'/run?run={run}' if run else '/alerts'}"
            text, link = f"{text} {url}", {"url": url}
        body = json.dumps({"type": f"alert.{event}", "text": text, **link, "data": facts})
        return [
            (webhook.name, message_of(alert), body)
            for webhook in self.rules.webhooks
            if alert.severity == "critical" or webhook.min_severity == "warning"
        ]


def _text(alert: models.Alert, reason: str) -> str:
    """Return a sentence about an alert, for chats."""
    subject = f"run {alert.run_id}" if alert.run_id else alert.subject or "data plane"
    if alert.run_id and alert.subject:
        subject += f" {alert.subject}"
    value, bound = (_figure(alert.kind, each) for each in (alert.value, alert.bound))
    of_value = "value before clearing" if reason else "value"
    figures = "" if alert.kind == "run_failed" else f"; {of_value} {value}, bound {bound}"
    since = datetime.fromtimestamp(alert.raised_ns // 10**9, UTC)
    text = (
        f"{alert.name} ({alert.severity}) {'cleared' if reason else 'raised'} for {subject}: "
        f"{reason or alert.sentence}{figures}, since {since:%Y-%m-%d %H:%M:%S} UTC."
    )
    # Slack and Mattermost read <...> as a link or a mention.
    return escape(printable(text), quote=False)


def _figure(kind: str, value: float) -> str:
    if kind in SECONDS:
        return duration(value)
    return f"{100 * value:.3g} %" if kind in FRACTIONS else f"{value:.4g}"


def _changed(decision: Decision, now_ns: int) -> list[tuple[models.Alert, str]]:
    """Return the alerts to store, each with the reason of its end; empty while it is raised."""
    new = [(_alert(measure, 0, now_ns), "") for measure in decision.raised]
    kept = [(_alert(measure, alert.id, alert.raised_ns), "") for alert, measure in decision.kept]
    cleared = [
        (alert.model_copy(update={"cleared_ns": now_ns}), reason)
        for alert, reason in decision.cleared
    ]
    return [*new, *kept, *cleared]


def _alert(measure: Measure, alert_id: int, raised_ns: int) -> models.Alert:
    rule = measure.rule
    facts = {"name": rule.name, "kind": rule.kind, "severity": rule.severity}
    return models.Alert.of(measure, id=alert_id, raised_ns=raised_ns, cleared_ns=None, **facts)
