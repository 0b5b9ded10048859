"""Checks of settings: hosts, origins, paths, links and token files."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path

LOOPBACK_HOSTS = ("127.0.0.1", "::1", "localhost")
MIN_TOKEN_LENGTH = 16

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
_ORIGIN = re.compile(
    r"(?P<scheme>https?)://(?P<host>[a-z0-9.-]+|\[[0-9a-f:.]+\])(?::(?P<port>[0-9]{1,5}))?"
)
# A placeholder: {name}, {{name}}, ${name} or <name>.
_PLACEHOLDER = re.compile(r"\$?\{+\s*[A-Za-z_][\w.-]*\s*\}+|<[A-Za-z_][\w.-]*>")
_PORTS = {"http": "80", "https": "443"}
_ROOT_PATH = re.compile(r"(/(?!\.{1,2}(/|$))[A-Za-z0-9._~-]+)*")
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")  # token68 of RFC 9110, what a Bearer header can carry


def canonical_host(host: str) -> str:
    """Return a host name or IP address in canonical form.

    Raises ValueError if it is neither, or has a port or a wildcard.
    """
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        name = host.lower().removesuffix(".")
        if _NAME.fullmatch(name) is None:
            raise ValueError(
                f"host {host!r}; expected a host name or an IP address without a port or wildcard"
            ) from None
        return name


def canonical_origin(origin: str) -> str:
    """Return an origin in canonical form, with its port.

    Raises ValueError if it is not http or https with a host and an optional port.
    """
    match = _ORIGIN.fullmatch(origin.lower())
    if match is None:
        raise ValueError(
            f"origin {origin!r}; expected a scheme, a host and an optional port, such as "
            "https://admin.example"
        )
    return f"{match['scheme']}://{match['host']}:{match['port'] or _PORTS[match['scheme']]}"


def origin_as_sent(canonical: str) -> str:
    """Return an origin as browsers send it: without the port that its scheme implies."""
    scheme, _, rest = canonical.partition("://")
    return f"{scheme}://{rest.removesuffix(f':{_PORTS[scheme]}')}"


def canonical_root_path(path: str) -> str:
    """Return a path with a leading slash and without a trailing one; the root is empty.

    Raises ValueError if it is not a path of letters, digits and ``-._~``.
    """
    stripped = path.strip("/")
    canonical = f"/{stripped}" if stripped else ""
    if _ROOT_PATH.fullmatch(canonical) is None:
        raise ValueError(
            f"root path {path!r}; expected a path such as /rl, of letters, digits, -._~"
        )
    return canonical


def check_link(url: str) -> None:
    """Check a URL of Jaeger, Tempo or Grafana to which trace pages link.

    Raises ValueError if it is not http or https, or has a placeholder other than ``{trace_id}``.
    """
    if not url.lower().startswith(("http://", "https://")):
        raise ValueError(f"found {url!r}; expected http://... or https://...")
    for placeholder in _PLACEHOLDER.findall(url):
        if placeholder != "{trace_id}":
            raise ValueError(
                f"found the placeholder {placeholder} in {url!r}; expected {{trace_id}}"
            )


def read_token(path: Path) -> str:
    """Return the token in a file, without white space around it.

    Raises:
        OSError: the file cannot be read.
        ValueError: the token is too short or does not fit into a header. The message does not
            contain it.
    """
    text = path.read_bytes().decode("utf-8", errors="replace").strip()
    try:
        check_token(text)
    except ValueError as error:
        raise ValueError(f"token file {str(path)!r}: {error}") from None
    return text


def check_token(token: str) -> None:
    """Check a bearer token.

    Raises ValueError if it is too short or does not fit into a header. The message does not contain
    it.
    """
    if len(token) < MIN_TOKEN_LENGTH or _TOKEN.fullmatch(token) is None:
        raise ValueError(
            f"expected one token of at least {MIN_TOKEN_LENGTH} characters (letters, digits, "
            "-._~+/); `openssl rand -hex 32` creates one"
        )
