"""A connection to a storage unit that carries nothing and ends with it.

The kernel ends it at once when the unit's process does, and within seconds when its machine no
longer answers; Ray itself notices the latter only when its health checks have failed several times.
A unit that is merely stopped keeps it.
"""

from __future__ import annotations

import asyncio

from dataplane_tq.keepalive import PART_TURN_S, end_when_silent
from dataplane_tq.packed import unit_wire as wire
from dataplane_tq.packed.unit_wire import UnitAddress

_CONNECT_S = 5.0


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
            end_when_silent(writer.get_extra_info("socket"), PART_TURN_S)
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
