"""A connection to a storage unit that carries nothing and ends with it.

The kernel ends it at once when the unit's process does, and within seconds when its machine no
longer answers; Ray itself notices the latter only when its health checks have failed several times.
A unit that is merely stopped keeps it.
"""

from __future__ import annotations

import asyncio
import socket

from dataplane_tq.packed import unit_wire as wire
from dataplane_tq.packed.unit_wire import UnitAddress

_CONNECT_S = 5.0
_IDLE_S = 1
_EVERY_S = 1
_PROBES = 3


async def until_gone(address: UnitAddress, token: bytes) -> str:
    """Wait until a unit is gone, for ever if it stays.

    Returns:
        A sentence that says so.
    """
    what = f"storage unit {address.unit!r} ({address.host}:{address.port}) is gone"
    writer = None
    try:
        async with asyncio.timeout(_CONNECT_S):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            notice_soon(writer.get_extra_info("socket"))
            writer.write(wire.hello(token))
            answer = await reader.readexactly(1)
        if answer != wire.ACCEPTED:
            return f"{what}: it refused the token"
        await reader.read(1)
    except TimeoutError as error:
        # The kernel's own, from probes without an answer, has a text.
        return f"{what}: {str(error) or 'no answer'}"
    except (OSError, asyncio.IncompleteReadError) as error:
        return f"{what}: {error}"
    finally:
        if writer is not None:
            writer.close()
    return f"{what}: its process ended"


def notice_soon(sock: socket.socket) -> None:
    """Let the kernel end a TCP connection within seconds if the other machine does not answer."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _EVERY_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
