"""The exceptions that data-plane clients raise.

All derive from `DataPlaneError`, and each also from the built-in that the contract names, so both
``except MissingDataError`` and ``except KeyError`` work. A message says which call failed, what was
found and what was expected; attributes carry the same facts for code.
"""

from __future__ import annotations

from collections.abc import Iterable

_LISTED = 10


def listed(names: Iterable[str]) -> str:
    """Return up to ten of ``names``, quoted, and the number of the others.

    Names can come from outside, so they are quoted by ``repr``, which keeps control characters out
    of logs and terminals.
    """
    items = list(names)
    shown = ", ".join(repr(name) for name in items[:_LISTED])
    rest = len(items) - _LISTED
    return f"{shown} and {rest} more" if rest > 0 else shown


class DataPlaneError(Exception):
    """Root of all errors of the data plane."""

    def __str__(self) -> str:
        # KeyError would print the repr of its message.
        return str(self.args[0]) if self.args else ""


class ConfigError(DataPlaneError, ValueError):
    """The configuration has an unknown key, lacks a key or holds a wrong value."""


class ClosedError(DataPlaneError, RuntimeError):
    """The client was used after `close`."""


class UnsupportedError(DataPlaneError, NotImplementedError):
    """The client does not support this operation, as its capabilities declare."""


class UnavailableError(DataPlaneError, RuntimeError):
    """A part that the client needs (controller, storage unit, peer) is dead or unreachable."""


class InvalidRequestError(DataPlaneError, ValueError):
    """The arguments of a call contradict each other or the contract; nothing was changed."""


class InvalidTypeError(InvalidRequestError, TypeError):
    """An argument or a value has a type that the contract does not accept; nothing was changed."""


class DuplicateSampleError(InvalidRequestError):
    """A put or a claim names a sample id more than once; nothing was changed."""


class SchemaMismatchError(InvalidRequestError, TypeError):
    """A put changes the dtype or kind of an existing field; nothing was stored."""


class PartitionNotFoundError(DataPlaneError, KeyError, ValueError):
    """The partition is not registered, or was cleared."""


class UnknownTaskError(DataPlaneError, KeyError):
    """The task is not one of the partition's declared consumer tasks."""


class MissingDataError(DataPlaneError, KeyError, ValueError):
    """A read names samples or fields that do not exist; the read returns nothing.

    Attributes:
        sample_ids: the ids that are unknown, cleared, or lack a field.
        fields: the fields that at least one requested row lacks; empty if only ids are unknown.
    """

    def __init__(
        self, message: str, *, sample_ids: Iterable[str] = (), fields: Iterable[str] = ()
    ) -> None:
        super().__init__(message)
        self.sample_ids = list(sample_ids)
        self.fields = list(fields)


class DeadlineExceededError(DataPlaneError, TimeoutError):
    """An operation did not finish within its deadline."""


class ClaimTimeoutError(DeadlineExceededError):
    """A blocking claim's deadline passed; nothing was claimed.

    Attributes:
        ready: number of unclaimed samples that match the claim and have all required fields, even
            if the claim could not take their group.
        missing: number of samples that the claim still needed.
        missing_fields: required field to the number of present samples without it.
        leased: number of samples that claims of the task hold under leases.
        holders: process ("host:pid", the caller included) to the number of samples it holds.
        first_expiry_s: seconds until the first lease of the task, or the first assignment to
            another data-parallel rank, expires; None if there is none.
    """

    def __init__(
        self,
        message: str,
        *,
        ready: int = 0,
        missing: int = 0,
        missing_fields: dict[str, int] | None = None,
        leased: int = 0,
        holders: dict[str, int] | None = None,
        first_expiry_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.ready = ready
        self.missing = missing
        self.missing_fields = dict(missing_fields or {})
        self.leased = leased
        self.holders = dict(holders or {})
        self.first_expiry_s = first_expiry_s


class CapacityExceeded(DataPlaneError, TimeoutError, RuntimeError):
    """The store stayed full until the put's deadline, or is too small; nothing was stored."""


class LeaseLostError(DataPlaneError, RuntimeError):
    """The claim's lease expired or was released, so its holder may no longer acknowledge it.

    Attributes:
        sample_ids: the call's samples that the claim no longer holds; all of them if the lease
            expired. The others can still be renewed and acknowledged. Empty if the store does not
            report them.
    """

    def __init__(self, message: str, *, sample_ids: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.sample_ids = list(sample_ids)


class SamplesLeasedError(DataPlaneError, RuntimeError):
    """A clear, a reset or `end_claim` found samples under a lease; nothing was changed."""


class CheckpointError(DataPlaneError, RuntimeError):
    """A checkpoint cannot be written, or is missing, changed or malformed.

    The message names the folder, the file or the partition.
    """
