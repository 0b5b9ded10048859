"""Settings of a refit: the control plane's address and the transport of weights."""

from __future__ import annotations

import secrets
import time

from grpo_trainer.config.sections import ControlAccessSection, RefitSection
from grpo_trainer.errors import WorkerError
from refit_mx import (
    ControlAccess,
    ControlClient,
    ControlUnavailableError,
    RefitError,
    VersionNotFoundError,
)

CONTROL_GRACE_S = 5.0
"""Seconds that a control plane may take to start or restart."""
_POLL_S = 0.2


class RefitSettings(RefitSection):
    """Refit section of a run, as sent to the policy and generation workers.

    Attributes:
        control: address of the control plane, which may be in the driver.
        model_name: name of the run's model in the control plane.
    """

    control: str
    model_name: str

    def connect(self) -> ControlClient:
        """Return a client of the control plane; the errors are those of the function `connect`."""
        return connect(self.control, self.control_access)

    @property
    def transports(self) -> tuple[str, ...] | None:
        """Transports that a publisher serves; None for all that it supports."""
        return None if self.transport == "auto" else (self.transport, "tcp")


def connect(address: str, access: ControlAccessSection) -> ControlClient:
    """Return a client of a control plane.

    Raises:
        RefitConfigError: the token or the certificates cannot be read, or the token would be sent
            unencrypted.
    """
    return ControlAccess(
        tls_ca=None if access.tls_ca is None else str(access.tls_ca),
        tls_name=access.tls_name,
        token_file=None if access.token_file is None else str(access.token_file),
        token_env=access.token_env,
    ).connect(address)


def check_control(config: RefitSection) -> None:
    """Check that a refit server's control plane answers and accepts the credentials.

    The check retries for `CONTROL_GRACE_S`. A run with an embedded control plane skips it.

    Raises:
        WorkerError: the server does not answer or refuses the credentials, or a file or variable
            with credentials cannot be read.
    """
    if config.control is None:
        return
    deadline = time.monotonic() + CONTROL_GRACE_S
    while True:
        try:
            with connect(config.control, config.control_access) as control:
                control.get_version(f"probe-by-the-driver-{secrets.token_hex(4)}")
        except VersionNotFoundError:
            return
        except RefitError as error:
            may_start = isinstance(error, ControlUnavailableError)
            if not may_start or time.monotonic() >= deadline:
                raise WorkerError(f"refit: {error}") from error
        time.sleep(_POLL_S)
