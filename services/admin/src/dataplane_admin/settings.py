"""Settings of the service."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from dataplane_admin.alerts import AlertRules, load_rules
from dataplane_admin.checks import (
    LOOPBACK_HOSTS,
    canonical_host,
    canonical_origin,
    canonical_root_path,
    check_link,
    check_token,
)
from dataplane_admin.ingest import Limits, check_pattern
from dataplane_admin.store import Retention


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of the service for `create_app`.

    Attributes:
        store_url: database of the telemetry: ``sqlite:///path`` or ``postgresql+psycopg://...``.
        token: bearer token of at least 16 characters, required by every route except ``/healthz``,
            ``/readyz``, ``/login`` and ``/static/``; None disables authentication.
        allowed_hosts: host names and addresses allowed in the Host header, without ports; requests
            with the token may use any.
        allowed_origins: origins, such as ``https://admin.example``, whose pages may send requests,
            in addition to the service's own.
        root_path: path prefix at which a proxy serves the pages, such as ``/rl``; empty for none.
        allow_actions: whether manual changes to the data plane are allowed.
        retention: how long and how much telemetry is stored.
        limits: limits of one OTLP request.
        ray_address: Ray cluster of the data plane. Without it, and without an inspector of
            `create_app`, only stored telemetry is shown.
        poll_s: seconds between polls of the data plane.
        query_timeout_s: deadline of one query to the data plane in seconds.
        stuck_after_s: age in seconds from which unclaimed samples and claims count as stuck.
        silent_after_s: seconds without telemetry after which a process counts as silent. A process
            that sends no metrics and does not repeat its waits may just be blocked. It counts as
            silent once another run was seen ``silent_after_s`` later than its own run.
        max_subscribers: maximum number of connections with live updates.
        failed_login_delay_s: delay in seconds of the answer to a wrong token.
        jaeger_url: base URL of Jaeger, to link traces.
        tempo_url: URL of a trace in Tempo or Grafana, with the placeholder ``{trace_id}``; without
            the placeholder, ``/api/traces/<id>`` is appended.
        alerts: rules and webhooks of alerts.
        alerts_every_s: seconds between evaluations of the rules.
        keep_sample_text: whether text of samples, and attributes that quote it, are stored.
        redact: patterns whose matches are replaced in stored text; they have no effect unless
            ``keep_sample_text``.

    Raises:
        ValueError: the token, an allowed host or origin, the root path, a pattern of ``redact``, or
            a link URL is invalid.
    """

    store_url: str
    token: str | None = field(default=None, repr=False)
    allowed_hosts: tuple[str, ...] = LOOPBACK_HOSTS
    allowed_origins: tuple[str, ...] = ()
    root_path: str = ""
    allow_actions: bool = False
    retention: Retention = field(default_factory=Retention)
    limits: Limits = field(default_factory=Limits)
    ray_address: str | None = None
    poll_s: float = 1.0
    query_timeout_s: float = 5.0
    stuck_after_s: float = 60.0
    silent_after_s: float = 300.0
    max_subscribers: int = 100
    failed_login_delay_s: float = 1.0
    jaeger_url: str | None = None
    tempo_url: str | None = None
    keep_sample_text: bool = False
    redact: tuple[re.Pattern[str], ...] = ()
    alerts: AlertRules = field(default_factory=load_rules)
    alerts_every_s: float = 10.0

    def __post_init__(self) -> None:
        """Convert hosts and the root path to canonical form, and check the other values."""
        if self.token is not None:
            try:
                check_token(self.token)
            except ValueError as error:
                raise ValueError(f"token: {error}") from None
        hosts = tuple(canonical_host(host) for host in self.allowed_hosts)
        object.__setattr__(self, "allowed_hosts", hosts)
        for origin in self.allowed_origins:
            canonical_origin(origin)
        object.__setattr__(self, "root_path", canonical_root_path(self.root_path))
        for pattern in self.redact:
            try:
                check_pattern(pattern)
            except ValueError as error:
                raise ValueError(f"redact: {error}") from None
        for name in ("jaeger_url", "tempo_url"):
            url = getattr(self, name)
            if url is not None:
                try:
                    check_link(url)
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from None

    @property
    def public_url(self) -> str | None:
        """URL of the service for people; None if unknown.

        Its host is both an allowed host and that of an allowed origin. An origin alone may be
        another site.
        """
        for origin in self.allowed_origins:
            host = urlsplit(origin).hostname
            if host in self.allowed_hosts and host not in LOOPBACK_HOSTS:
                return f"{origin}{self.root_path}"
        return None
