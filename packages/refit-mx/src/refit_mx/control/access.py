"""`ControlAccess`: the certificates that a process trusts and the token that it sends.

It holds the location of a token and never the token, so it may be written to a configuration, sent
to other processes and logged.
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
    """TLS and token settings of a connection to a control plane; by default it uses neither.

    Attributes:
        tls_ca: PEM file of the certificates to trust.
        tls_name: expected name in the server's certificate; None for the host of its address.
        token_file: file with the token.
        token_env: environment variable with the token.

    Raises:
        RefitConfigError: ``token_file`` and ``token_env`` are both given, or ``tls_name`` without
            ``tls_ca``.
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
        """Read ``REFIT_MX_CONTROL_TLS_CA``, ``..._TLS_NAME``, ``..._TOKEN_FILE`` and ``..._TOKEN``.

        An empty variable counts as not set.

        Raises:
            RefitConfigError: for the reasons given in the class.
        """
        return cls(
            tls_ca=os.environ.get(TLS_CA) or None,
            tls_name=os.environ.get(TLS_NAME) or None,
            token_file=os.environ.get(TOKEN_FILE) or None,
            token_env=TOKEN if os.environ.get(TOKEN) else None,
        )

    def connect(self, address: str, *, rpc_timeout_s: float = 10.0) -> ControlClient:
        """Read the certificates and token, and return a client of the control plane at HOST:PORT.

        Raises:
            RefitConfigError: the token or the certificates cannot be read, or the token would be
                sent unencrypted.
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
