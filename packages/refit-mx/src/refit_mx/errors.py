"""Every error that refit raises. All are `RefitError`; those that a retry may cure say so.

No operation waits without a deadline: one that passes it raises `RefitTimeoutError` or, where the
cause is known, the error of the cause.
"""

from __future__ import annotations


class RefitError(Exception):
    """Base of all.

    Attributes:
        retryable: whether the same call may succeed when it is made again, against other sources or
            later.
    """

    retryable = False


class RefitConfigError(RefitError, ValueError):
    """An argument or a setting is wrong; nothing was started."""


class ControlError(RefitError):
    """The control plane refused a call; the message is its own."""


class ControlUnavailableError(ControlError, ConnectionError):
    """The control plane cannot be reached."""

    retryable = True


class ControlAccessError(ControlError):
    """The control plane refused the token, or is not the one whose certificate is trusted.

    The same call fails again until a token, a certificate or a setting is put right.
    """


class VersionNotFoundError(ControlError, LookupError):
    """The control plane knows no version of this id."""


class VersionNotReadyError(ControlError):
    """The version exists and is not READY: sources are missing, or it is being released."""

    retryable = True


class VersionLeasedError(ControlError):
    """A receiver still holds a lease on the version, so its shards stay."""

    retryable = True


class LeaseLostError(ControlError):
    """The lease on a version ran out; what was read under it may not be used."""

    retryable = True


class RefitTimeoutError(RefitError, TimeoutError):
    """A deadline passed; the message says what was awaited."""

    retryable = True


class SourceLostError(RefitError, ConnectionError):
    """A source died, was restarted, or does not hold the version any more.

    Attributes:
        worker_ids: of the sources, so that a retry can leave them out.
    """

    retryable = True

    def __init__(self, message: str, worker_ids: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.worker_ids = worker_ids


class DigestMismatchError(RefitError):
    """Bytes that arrived are not those that were published.

    Attributes:
        worker_ids: of the sources that they came from.
    """

    retryable = True

    def __init__(self, message: str, worker_ids: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.worker_ids = worker_ids


class ProtocolError(RefitError):
    """A peer sent what the protocol does not allow."""


class LayoutError(RefitError, ValueError):
    """Published shards and wanted slices do not fit: the message says which rows of what are
    missing, or which shapes or dtypes differ."""


class CompileTargetError(RefitError):
    """No source has the compile target and metadata that a receiver asks for, or a compile pass
    cannot make what is wanted from what is published. Raised before any byte moves."""


class CompileError(RefitError, ValueError):
    """A compile pass met a value that it cannot represent; nothing live was changed."""


class ScratchExhaustedError(RefitError, MemoryError):
    """No scratch buffer is free: the others are in use or in quarantine."""

    retryable = True


class PhaseError(RefitError):
    """A weight-transfer engine was called in the wrong phase; its state is unchanged."""


class FencedError(RefitError):
    """The worker is fenced: an install failed half way, so it must not serve until one succeeds."""


class FleetError(RefitError):
    """Not every server of a fleet could be brought to a version; none was resumed with another.

    Attributes:
        failed: address to what went wrong there.
    """

    retryable = True

    def __init__(self, message: str, failed: dict[str, str]) -> None:
        super().__init__(message)
        self.failed = failed
