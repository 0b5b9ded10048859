"""Everything that the service is told when it starts."""

from __future__ import annotations

from dataclasses import dataclass, field

from dataplane_admin.host import LOOPBACK_HOSTS
from dataplane_admin.ingest import Limits
from dataplane_admin.options import check_link
from dataplane_admin.root_path import canonical_root_path
from dataplane_admin.store import Retention


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What `create_app` builds the service from.

    Attributes:
        store_url: where what arrives is kept: ``sqlite:///path`` or ``postgresql+psycopg://...``.
        token: bearer token for every route but ``/healthz``; None lets everybody in.
        allowed_hosts: host names and addresses that the Host header may name, without ports; with
            the token a request may name any.
        allowed_origins: further origins, such as ``https://admin.example``, whose pages may send
            requests; the address that is asked is always one.
        root_path: path below which a proxy serves the pages, such as ``/rl``; empty for none.
        allow_actions: whether the data plane may be changed by hand.
        retention: how much is kept, and for how long.
        limits: what one OTLP request may hold.
        ray_address: of the Ray cluster on which the data plane runs; None shows history only.
        poll_s: seconds between two looks into the data plane.
        ask_s: seconds that one drill-down into the data plane may take.
        stuck_after_s: age in seconds from which unclaimed samples and claims are shown, and before
            which nothing counts as stuck.
        silent_after_s: for how long in seconds nothing was heard of a process that sends metrics or
            tells its waits again, until what it waited for is shown apart. Processes send metrics
            every minute.
        most_subscribers: connections that may wait for live updates at a time.
        failed_login_delay_s: seconds after which a wrong token is answered.
        jaeger_url: base of Jaeger's pages, to link traces to.
        tempo_url: where a trace can be looked at in Tempo or Grafana, with ``{trace_id}`` in it;
            without, ``/api/traces/<id>`` is appended.
        keep_sample_text: whether attributes that quote samples are kept.

    Raises:
        ValueError: a URL to link to is none of http or https, or the root path is none.
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
    ask_s: float = 5.0
    stuck_after_s: float = 60.0
    silent_after_s: float = 300.0
    most_subscribers: int = 100
    failed_login_delay_s: float = 1.0
    jaeger_url: str | None = None
    tempo_url: str | None = None
    keep_sample_text: bool = False

    def __post_init__(self) -> None:
        """Bring the root path into its form, and refuse links that lead elsewhere than to a page.

        Raises:
            ValueError: a URL is none of http or https, or the root path is none.
        """
        object.__setattr__(self, "root_path", canonical_root_path(self.root_path))
        for name in ("jaeger_url", "tempo_url"):
            url = getattr(self, name)
            if url is not None:
                try:
                    check_link(url)
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from None
