"""`Operation` and `Observer`: one call to a client, and the interface that observes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal  # Any: tags and extra keywords are the caller's own

from dataplane_core import DataPlaneClient, DataPlaneError
from dataplane_core.arguments import checked_bool, checked_int, checked_items

Op = Literal[
    "register",
    "claim_meta",
    "get_data",
    "check_consumption_status",
    "put",
    "get",
    "clear",
    "close",
    "acknowledge",
    "release",
    "renew",
]


@dataclass(eq=False)
class Operation:
    """One call to a client; its outcome is filled in when it ends.

    In ``partition_id``, ``fields``, ``tasks`` and ``sample_ids``, the name of its type replaces a
    value that is not a string. Ids in a list are stored unchecked.

    Attributes:
        op: name of the operation.
        partition_id: the partition; empty for close.
        n_keys: number of samples; the claimed ones for a claim, the declared ones for register.
        n_bytes: bytes of tensors put or read.
        sample_ids: ids of the samples; the claimed ones for a claim. None is all samples of the
            partition.
        fields: the fields put, read, required or declared.
        tasks: the claiming task, or the tasks declared by register.
        put_bytes: bytes put, by field.
        tags: tags of a put, which observers may replace, or of the claimed samples.
        options: further arguments by name: ``batch_size`` and ``blocking`` of a claim;
            ``withdrawn`` of a clear that withdraws samples.
        leased: whether a claim leased its samples.
        extra: extra keywords of a put or a read; observers may add to them.
        wall_s: duration in seconds; 0 during the call.
        error: the exception that was raised; None if there was none.
        started_ns: start in nanoseconds since 1970, if the operation is reported only after it
            ended; else None.
    """

    op: Op
    partition_id: str
    n_keys: int = 0
    n_bytes: int = 0
    sample_ids: Sequence[str] | None = ()
    fields: Sequence[str] = ()
    tasks: Sequence[str] = ()
    put_bytes: Mapping[str, int] = field(default_factory=dict)
    tags: list[dict[str, Any]] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    leased: bool = False
    extra: dict[str, Any] = field(default_factory=dict)
    wall_s: float = 0.0
    error: BaseException | None = None
    started_ns: int | None = None
    _inner: DataPlaneClient | None = None
    _origins: dict[str, int] | None = None

    def __post_init__(self) -> None:
        """Replace values of wrong types, so that observers can rely on the declared types."""
        self.partition_id = _text(self.partition_id)
        self.fields, self.tasks = _texts(self.fields), _texts(self.tasks)
        if self.sample_ids is not None and type(self.sample_ids) is not list:
            self.sample_ids = _texts(self.sample_ids)

    @property
    def inner(self) -> DataPlaneClient | None:
        """The wrapped client."""
        return self._inner

    @property
    def status(self) -> Literal["ok", "timeout", "error"]:
        """The outcome so far; ok while the operation runs."""
        if self.error is None:
            return "ok"
        return "timeout" if isinstance(self.error, TimeoutError) else "error"

    def request_origins(self) -> None:
        """Request the origins with the data of a read, so that `origins` needs no query."""
        if self._inner is not None and self._inner.capabilities.origins:
            if self.extra.get("origins") is None:
                self.extra["origins"] = {}
            self._origins = self.extra["origins"]

    def origins(self) -> Mapping[str, int]:
        """Return the number of samples by origin (``str`` of an `Origin`).

        It is available after a successful claim or read. The store is queried at most once.
        """
        if self._origins is None:
            self._origins = {}
            if self._inner is not None and self.sample_ids and self._inner.capabilities.origins:
                with suppress(DataPlaneError):  # for example, the samples were cleared meanwhile
                    self._origins = self._inner.read_origins(
                        self.sample_ids, self.partition_id, self.fields
                    )
        return self._origins


def bool_or_false(value: object) -> bool:
    """Convert an argument to bool as the client does; return False if the client rejects it."""
    try:
        return checked_bool("", "", value)
    except DataPlaneError:
        return False


def int_or_zero(value: object) -> int:
    """Convert an argument to int as the client does; return 0 if the client rejects it."""
    try:
        return checked_int("", "", value)
    except DataPlaneError:
        return 0


def _text(value: object) -> str:
    return value if isinstance(value, str) else type(value).__name__


def _texts(value: object) -> list[str]:
    try:
        return list(map(_text, checked_items("", "", value, "")))
    except DataPlaneError:
        return []


class Observer:
    """The interface of an observer of operations. Both methods run in the caller's thread."""

    def begin(self, call: Operation) -> Any:
        """Observe the start of an operation; `end` gets the return value as ``state``."""

    def end(self, call: Operation, state: Any) -> None:
        """Observe the end of an operation. Observers end in the reverse order of `begin`."""
