"""What every process of a refit is told: where the control plane is, and how weights travel."""

from __future__ import annotations

import secrets
import time
from typing import Literal

from grpo_trainer.errors import WorkerError
from grpo_trainer.sections import (
    ControlAccessSection,
    PositiveFloat,
    PositiveInt,
    RefitSection,
    Section,
)
from refit_mx import (
    ControlAccess,
    ControlClient,
    ControlUnavailableError,
    RefitError,
    VersionNotFoundError,
)

PATIENCE_S = 5.0
"""For a control plane that is started beside the run, or again."""
_PAUSE_S = 0.2


class RefitSettings(Section):
    """Travels to the policy and generation workers.

    Attributes:
        control: address of the control plane, host:port.
        control_access: what is trusted and brought there; says where a token is, never the token.
        model_name: by which the control plane knows the run's model.
        transport: how the bytes move.
        host: on which policy workers listen; see `own_hosts`.
        advertised_host: that they tell; see `own_hosts`.
        tensor_parallel: shards that the generation worker assembles its weights from.
        timeout_s: deadline of a publish and of a refit, in seconds.
    """

    control: str
    control_access: ControlAccessSection
    model_name: str
    transport: Literal["auto", "nixl", "shm", "tcp"]
    host: str
    advertised_host: str | None
    tensor_parallel: PositiveInt
    timeout_s: PositiveFloat

    def connect(self) -> ControlClient:
        """A client of the control plane.

        Raises:
            RefitConfigError: the token or the certificates cannot be read.
        """
        return connect(self.control, self.control_access)

    @property
    def transports(self) -> tuple[str, ...] | None:
        """What a publisher offers; None for all that it can."""
        return None if self.transport == "auto" else (self.transport, "tcp")


def connect(address: str, access: ControlAccessSection) -> ControlClient:
    """A client of a control plane.

    Raises:
        RefitConfigError: the token or the certificates cannot be read, or the token would travel in
            the clear.
    """
    return ControlAccess(
        tls_ca=None if access.tls_ca is None else str(access.tls_ca),
        tls_name=access.tls_name,
        token_file=None if access.token_file is None else str(access.token_file),
        token_env=access.token_env,
    ).connect(address)


def check_control(config: RefitSection) -> None:
    """See that the control plane of a refit server answers and takes what is brought to it.

    One that is not there yet is waited for, `PATIENCE_S`. A run that has one of its own has nothing
    to check.

    Raises:
        WorkerError: it does not, or what is to be brought cannot be read.
    """
    if config.control is None:
        return
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            with connect(config.control, config.control_access) as control:
                control.get_version(f"asked-by-the-driver-{secrets.token_hex(4)}")
        except VersionNotFoundError:
            return
        except RefitError as error:
            away = isinstance(error, ControlUnavailableError)
            if not away or time.monotonic() >= until:
                raise WorkerError(f"refit: {error}") from error
        time.sleep(_PAUSE_S)
