"""The address that the server listens on, with a check whether other machines can reach it."""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass

_ADDRESS = re.compile(r"(?:\[(?P<ipv6>[^\[\]]+)\]|(?P<host>[^\[\]:]+)):(?P<port>[0-9]{1,5})")


def split_address(text: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``, without the brackets of an IPv6 host.

    Raises:
        ValueError: ``text`` has another form.
    """
    match = _ADDRESS.fullmatch(text)
    if match is None or int(match["port"]) > 65535:
        raise ValueError(f"address {text!r}; expected HOST:PORT, such as 127.0.0.1:50051")
    return match["ipv6"] or match["host"], int(match["port"])


@dataclass(frozen=True)
class Address:
    """A numeric address, resolved once, so that the address checked is the one bound."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Resolve ``HOST:PORT`` to its first address; an IPv6 host needs brackets.

        Raises:
            ValueError: ``text`` has another form, or the host is unknown.
        """
        host, port = split_address(text)
        try:
            entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise ValueError(f"address {text!r}: the host is unknown ({error})") from None
        return cls(str(entries[0][4][0]), port)

    @property
    def is_loopback(self) -> bool:
        """True if only this machine can reach the address."""
        address = ipaddress.ip_address(self.host)
        # Only Python 3.13 and later count ::ffff:127.0.0.1 as loopback; here it never counts.
        return address.is_loopback and getattr(address, "ipv4_mapped", None) is None

    def check_access(self, *, has_tls: bool, has_token: bool) -> None:
        """Check that only this machine can reach the address, or that TLS and a token protect it.

        Raises:
            ValueError: other machines can reach it, and TLS or the token is missing.
        """
        if not (self.is_loopback or (has_tls and has_token)):
            raise ValueError(
                f"{self} is reachable from other machines; set a TLS certificate and key and a "
                "token, or use a loopback address"
            )

    def check_free(self) -> None:
        """Bind the address and release it.

        Raises:
            OSError: the address is in use, or does not belong to this machine.
        """
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((self.host, self.port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
