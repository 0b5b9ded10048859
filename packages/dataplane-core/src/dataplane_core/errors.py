"""Every exception that a data-plane client raises.

One tree, rooted at `DataPlaneError`. Each class also derives from the built-in that the contract
names for its case, so both ``except MissingDataError`` and ``except KeyError`` work. A message says
which call failed, what was found and what was expected; attributes carry the same facts for code.
"""

from __future__ import annotations

from collections.abc import Iterable

_LISTED = 10


def listed(names: Iterable[str]) -> str:
    """At most ten of ``names``, quoted, and how many more there are.

    Identifiers can come from outside, so they are shown by ``repr``, which keeps control characters
    out of logs and terminals.
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
    """The client declares by its capabilities that it does not offer this operation."""


class UnavailableError(DataPlaneError, RuntimeError):
    """A part the client depends on (controller, storage unit, peer) is dead or unreachable."""


class InvalidRequestError(DataPlaneError, ValueError):
    """The arguments of a call contradict each other or the contract; nothing was changed."""


class InvalidTypeError(InvalidRequestError, TypeError):
    """An argument or a value is of a type that the contract does not take; nothing was changed."""


class DuplicateSampleError(InvalidRequestError):
    """One put names a sample id more than once; nothing was stored."""


class SchemaMismatchError(InvalidRequestError, TypeError):
    """A put changes the dtype or kind of an existing field; nothing was stored."""


class PartitionNotFoundError(DataPlaneError, KeyError, ValueError):
    """The partition is not registered, or was cleared as a whole."""


class UnknownTaskError(DataPlaneError, KeyError):
    """The task is not one of the partition's declared consumer tasks."""


class MissingDataError(DataPlaneError, KeyError, ValueError):
    """A read names samples or fields that are not there; nothing is returned in their place.

    Attributes:
        sample_ids: the ids that are unknown, cleared, or lack a field.
        fields: the fields that at least one of the asked rows lacks; empty if only ids are unknown.
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
        ready: number of samples that could have been claimed.
        missing: number of samples that the claim still waited for.
        missing_fields: how many of the present samples lack each required field.
        leased: number of samples that claims of the task hold under leases.
        holders: process ("host:pid", the caller's own included) to how many of those it holds.
        first_expiry_s: seconds until the first lease of the task expires, those under which
            samples wait for other data-parallel ranks included; None if there is none.
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
    """The store stayed full until the put's deadline; nothing was stored."""


class LeaseLostError(DataPlaneError, RuntimeError):
    """The claim's lease expired or was released, so its holder may no longer settle it.

    Attributes:
        sample_ids: those of the call that the claim no longer holds, all of them if its lease has
            ended; the others can still be renewed and settled. Empty if the store does not say.
    """

    def __init__(self, message: str, *, sample_ids: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.sample_ids = list(sample_ids)


class SamplesLeasedError(DataPlaneError, RuntimeError):
    """A clear, a reset or the end of a claim met samples under a lease; nothing was changed."""


class CheckpointError(DataPlaneError, RuntimeError):
    """A partition's checkpoint cannot be written, or is not whole; names the folder or file."""
