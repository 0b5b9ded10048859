"""The address that the server listens on, and whether others than this machine can reach it."""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass, replace

_ADDRESS = re.compile(r"(?:\[(?P<ipv6>[^\[\]]+)\]|(?P<host>[^\[\]:]+)):(?P<port>[0-9]{1,5})")


@dataclass(frozen=True)
class Address:
    """A numeric address, resolved once, so that what was checked is what is bound."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """The first address that ``HOST:PORT`` stands for; an IPv6 host is put into brackets.

        Raises:
            ValueError: if ``text`` has another form or the host is not known.
        """
        match = _ADDRESS.fullmatch(text)
        if match is None or int(match["port"]) > 65535:
            raise ValueError(f"address {text!r}; expected HOST:PORT, such as 127.0.0.1:50051")
        try:
            found = socket.getaddrinfo(
                match["ipv6"] or match["host"], None, type=socket.SOCK_STREAM
            )
        except (OSError, UnicodeError) as error:
            raise ValueError(f"address {text!r}: the host is not known ({error})") from None
        return cls(str(found[0][4][0]), int(match["port"]))

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches the address."""
        return ipaddress.ip_address(self.host).is_loopback

    def with_port(self, port: int) -> Address:
        """The same host at ``port``."""
        return replace(self, port=port)

    def check_free(self) -> None:
        """Bind the address and let it go.

        Raises:
            OSError: if it is in use or not one of this machine.
        """
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((self.host, self.port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
