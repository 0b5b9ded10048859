"""Webhooks: one thread for each webhook sends signed notifications in order, with retries.

The headers and the signature are those of Standard Webhooks (https://www.standardwebhooks.com), so
receivers can verify them with its libraries.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import threading
import time
from dataclasses import dataclass

import httpx
import structlog

from dataplane_admin.alerts.rules import Webhook
from dataplane_admin.store import Batch, Store, StoreError
from dataplane_admin.store.apply_alerts import (
    Notification,
    claim_notification,
    finish_notification,
    retry_notification,
)
from dataplane_admin.store.work import Work

_ATTEMPT_S = 10.0
_CLAIM_S = 30.0
"""Seconds for which a notification is claimed: an attempt, and time to store its result."""
_FIRST_RETRY_S = 1.0
_MAX_RETRY_S = 300.0
_POLL_S = 1.0
_STOP_S = 2.0
_REFUSED = frozenset({400, 413, 415, 422})
"""Statuses by which a receiver refuses one notification, which is then dropped."""

logger = structlog.get_logger("dataplane_admin")


@dataclass
class Sent:
    """Counters of a webhook since the service started; see `models.WebhookStatus`."""

    delivered: int = 0
    failed: int = 0
    dropped: int = 0


class Sender:
    """Thread that delivers the notifications of one webhook."""

    def __init__(self, store: Store, webhook: Webhook) -> None:
        self.webhook = webhook
        self.sent = Sent()
        self._store = store
        self._secret = webhook.secret()
        self._ending = threading.Event()
        name = f"webhook-{webhook.name}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start sending."""
        self._thread.start()

    def close(self) -> None:
        """Stop; a running attempt may be repeated later by any service."""
        self._ending.set()

    def join(self) -> None:
        """Wait up to `_STOP_S` seconds for a running attempt."""
        if self._thread.ident is not None:
            self._thread.join(_STOP_S)

    def _run(self) -> None:
        while not self._ending.is_set():
            try:
                busy = self._send_next()
            except StoreError:  # logged by the store; the notification stays stored
                busy = False
            except Exception:  # the thread must continue
                logger.exception("webhook_failed", webhook=self.webhook.name)
                busy = False
            if not busy:
                self._ending.wait(_POLL_S)

    def _send_next(self) -> bool:
        """Send the oldest notification if it is due; return whether it was delivered or refused."""
        pending = self._store.pending_notifications().get(self.webhook.name)
        if pending is None or pending[2] > time.time_ns():
            return False
        claimed: list[Notification] = []

        def claim(work: Work) -> bool:
            claimed.clear()
            until_ns = work.now_ns + int(_CLAIM_S * 1e9)
            notification = claim_notification(work, self.webhook.name, until_ns)
            claimed.extend([] if notification is None else [notification])
            return False

        self._store.write(Batch(changes=(claim,)))
        return bool(claimed) and self._attempt(claimed[0])

    def _attempt(self, notification: Notification) -> bool:
        loop = asyncio.new_event_loop()
        try:
            result = loop.run_until_complete(self._post(notification))
        finally:
            # Unlike `asyncio.run`, this does not wait for a name resolution that hangs.
            loop.close()
        problem = _problem(result)
        is_done = problem is None or result in _REFUSED

        def save(work: Work) -> bool:
            if is_done:
                return finish_notification(work, notification.id)
            assert problem is not None
            wait_s = min(_MAX_RETRY_S, _FIRST_RETRY_S * 2 ** min(20, notification.attempts - 1))
            next_ns = work.now_ns + int(wait_s * 1e9)
            return retry_notification(work, notification.id, problem, next_ns)

        if problem is None:
            self.sent.delivered += 1
        else:
            self.sent.failed += 1
            self.sent.dropped += is_done
            if notification.attempts == 1:
                logger.warning("webhook_failed", webhook=self.webhook.name, reason=problem)
        self._store.write(Batch(changes=(save,)))
        return is_done

    async def _post(self, notification: Notification) -> int | str:
        """Send a notification within the deadline; return the status, or why there is none."""
        body = notification.body.encode()
        sent_s = str(time.time_ns() // 10**9)
        headers = {
            "content-type": "application/json",
            "user-agent": "dataplane-admin",
            "webhook-id": notification.message,
            "webhook-timestamp": sent_s,
            "webhook-signature": signature(self._secret, notification.message, sent_s, body),
        }
        try:
            async with asyncio.timeout(_ATTEMPT_S):
                # The environment's proxies and netrc are not for this receiver.
                async with (
                    httpx.AsyncClient(
                        trust_env=False, follow_redirects=False, timeout=_ATTEMPT_S
                    ) as client,
                    client.stream(
                        "POST", self.webhook.url, content=body, headers=headers
                    ) as answer,
                ):
                    return answer.status_code
        except (TimeoutError, httpx.TimeoutException):
            return f"no answer within {_ATTEMPT_S:g} s"
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            # The error's text may have the URL, whose path may be a secret.
            return f"cannot be reached: {type(error).__name__}"


def _problem(result: int | str) -> str | None:
    """Return the error of an attempt; None if the notification was accepted."""
    if isinstance(result, str):
        return result
    if 200 <= result < 300:
        return None
    what = ", a redirect, which is not followed" if 300 <= result < 400 else ""
    return f"answered with status {result}{what}"


def signature(secret: bytes, message: str, sent_s: str, body: bytes) -> str:
    """Return the value of the header ``webhook-signature``."""
    signed = f"{message}.{sent_s}.".encode() + body
    digest = hmac.new(secret, signed, hashlib.sha256).digest()
    return f"v1,{base64.b64encode(digest).decode()}"
