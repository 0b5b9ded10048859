"""`ControlAccess`: what a process trusts and brings when it speaks to a control plane.

It says where a token is and never holds it, so it may be written into a configuration, travel to
other processes and appear in a log.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from refit_mx.control.auth import checked_token, read_token
from refit_mx.control.client import ControlClient
from refit_mx.errors import RefitConfigError

TLS_CA = "REFIT_MX_CONTROL_TLS_CA"
TLS_NAME = "REFIT_MX_CONTROL_TLS_NAME"
TOKEN_FILE = "REFIT_MX_CONTROL_TOKEN_FILE"  # noqa: S105  # a name
TOKEN = "REFIT_MX_CONTROL_TOKEN"  # noqa: S105  # a name


@dataclass(frozen=True)
class ControlAccess:
    """How a control plane with TLS and a token is spoken to; all of it None for one without.

    Attributes:
        tls_ca: PEM file of the certificates to trust.
        tls_name: that the server's certificate has to be of; None for the host of its address.
        token_file: file with the token.
        token_env: name of the environment variable with the token.

    Raises:
        RefitConfigError: both places of a token are named, or a name without certificates.
    """

    tls_ca: str | None = None
    tls_name: str | None = None
    token_file: str | None = None
    token_env: str | None = None

    def __post_init__(self) -> None:
        if self.token_file is not None and self.token_env is not None:
            raise RefitConfigError(
                f"a token is in the file {self.token_file!r} and in the environment variable "
                f"{self.token_env!r}; expected one of them"
            )
        if self.tls_name is not None and self.tls_ca is None:
            raise RefitConfigError(f"tls_name {self.tls_name!r} without tls_ca; expected both")

    @classmethod
    def from_environment(cls) -> ControlAccess:
        """What the variables ``REFIT_MX_CONTROL_TLS_CA``, ``..._TLS_NAME``, ``..._TOKEN_FILE`` and
        ``..._TOKEN`` of this process say; one that is empty is not set.

        Raises:
            RefitConfigError: as for the arguments.
        """
        return cls(
            tls_ca=os.environ.get(TLS_CA) or None,
            tls_name=os.environ.get(TLS_NAME) or None,
            token_file=os.environ.get(TOKEN_FILE) or None,
            token_env=TOKEN if os.environ.get(TOKEN) else None,
        )

    def connect(self, address: str, *, rpc_timeout_s: float = 10.0) -> ControlClient:
        """A client of the control plane at an address, HOST:PORT. Reads the files now.

        Raises:
            RefitConfigError: the token or the certificates cannot be read, or the token would
                travel in the clear.
        """
        return ControlClient(
            address,
            rpc_timeout_s=rpc_timeout_s,
            tls_ca=self.tls_ca,
            tls_name=self.tls_name,
            token=self._token(),
        )

    def _token(self) -> str | None:
        if self.token_file is not None:
            return read_token(Path(self.token_file))
        if self.token_env is None:
            return None
        text = os.environ.get(self.token_env)
        if text is None:
            raise RefitConfigError(f"token: the environment variable {self.token_env} is not set")
        return checked_token(text, f"token in the environment variable {self.token_env}")
