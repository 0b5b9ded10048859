"""The certificate and key of a server."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc


@dataclass(frozen=True)
class TlsFiles:
    """PEM files of a certificate chain, and of the private key of its first certificate."""

    cert: Path
    key: Path

    def credentials(self) -> grpc.ServerCredentials:
        """Return credentials for a gRPC server.

        Raises:
            ValueError: a file cannot be read, or the key does not match. gRPC would accept such
                files and then fail every handshake.
        """
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
                self.cert, self.key, password=_no_passphrase
            )
            return grpc.ssl_server_credentials([(self.key.read_bytes(), self.cert.read_bytes())])
        except OSError as error:
            raise ValueError(
                f"TLS certificate {str(self.cert)!r} with key {str(self.key)!r}: {error}"
            ) from None


def _no_passphrase() -> str:
    # Otherwise OpenSSL would ask at the terminal.
    raise ValueError("the TLS key is protected by a passphrase; expected a key without one")
