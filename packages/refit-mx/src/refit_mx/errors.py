"""Errors of refit: all derive from `RefitError`, and `retryable` marks those worth a retry.

An invalid argument of a layout or a deadline raises a plain `ValueError` or `TypeError` instead.
Every operation has a deadline. When it passes, the operation raises `RefitTimeoutError` or, if the
cause is known, the error of that cause.
"""

from __future__ import annotations


class RefitError(Exception):
    """Base class of all errors.

    Attributes:
        retryable: whether the same call may succeed later, or with other sources.
    """

    retryable = False


class RefitConfigError(RefitError, ValueError):
    """An invalid argument or setting; nothing was started."""


class ControlError(RefitError):
    """A call that the control plane refused; the message comes from the control plane."""


class ControlUnavailableError(ControlError, ConnectionError):
    """A control plane that cannot be reached."""

    retryable = True


class ControlAccessError(ControlError):
    """A refused token, or a server whose certificate is not trusted.

    The same call fails again until the token, the certificate or the setting is corrected.
    """


class VersionNotFoundError(ControlError, LookupError):
    """A version id that the control plane does not know."""


class VersionNotReadyError(ControlError):
    """A version that exists but is not READY: sources are missing, or it is being released."""

    retryable = True


class VersionLeasedError(ControlError):
    """A version that a receiver still leases, so its shards must stay."""

    retryable = True


class LeaseLostError(ControlError):
    """An expired lease on a version; what was read under it must not be used."""

    retryable = True


class RefitTimeoutError(RefitError, TimeoutError):
    """A deadline that passed; the message names the operation."""

    retryable = True


class SourceError(RefitError):
    """Sources of a version that cannot be used.

    Attributes:
        worker_ids: workers of these sources, so that a retry can exclude them.
    """

    retryable = True

    def __init__(self, message: str, worker_ids: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.worker_ids = worker_ids


class SourceLostError(SourceError, ConnectionError):
    """A source that died, restarted, or no longer holds the version."""


class DigestMismatchError(SourceError):
    """Received bytes that differ from the published ones."""


class ProtocolError(RefitError):
    """A message from a peer that the protocol does not allow."""


class LayoutError(RefitError, ValueError):
    """Published shards that do not match the requested slices.

    The message says which rows of which tensor are missing, or which shapes or dtypes differ.
    """


class CompileTargetError(RefitError):
    """A requested compile target that no source publishes and no compile pass can produce.

    Raised before any byte moves.
    """


class CompileError(RefitError, ValueError):
    """A value that a compile pass cannot represent; no live weight was changed."""


class ScratchExhaustedError(RefitError, MemoryError):
    """No free scratch buffer: all are in use or in quarantine."""

    retryable = True


class PhaseError(RefitError):
    """A call at the wrong time, such as on a closed receiver; no live weight was changed."""


class FencedError(RefitError):
    """A fenced worker: an install failed part way, so it must not serve until a refit succeeds."""


class FleetError(RefitError):
    """A failed refit or resume of a fleet; paused servers never resume with different versions.

    Attributes:
        failed: reason of each failure, by server address.
    """

    retryable = True

    def __init__(self, message: str, failed: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.failed = failed or {}
