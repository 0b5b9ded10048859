"""`Directory`: the server that records which samples exist, who claimed them, and where they are.

It serves the `StoreState` of one store, in one thread with one event loop. It never holds a
sample's values, and it imports neither torch nor TransferQueue.
"""

from __future__ import annotations

import asyncio
import gc
import hmac
import secrets
import socket
import threading
from collections.abc import Iterable, Sequence
from concurrent import futures

from dataplane_core import UnavailableError
from dataplane_core.ledger import ClaimOrder
from dataplane_core.peer_log import fault
from dataplane_tq.directory.connection import Connection
from dataplane_tq.directory.store_state import StoreState
from dataplane_tq.directory.wire import TOKEN_BYTES, Address
from dataplane_tq.packed.unit_wire import UnitAddress, UnitSpec, wait_until_gone
from dataplane_tq.sockets import max_connections

_HANDSHAKE_S = 5.0
_BACKLOG = 1024
_ACCEPTED_AT_ONCE = 16


class Directory:
    """Server of one store, with one thread.

    `start` starts the thread. Call the other methods only in it, unless they say otherwise.

    Args:
        host: address to listen on. The other arguments are those of `StoreState`.
    """

    def __init__(
        self,
        capacity: int,
        units: Sequence[UnitSpec],
        host: str,
        order: ClaimOrder | None = None,
        *,
        mirrored: bool = True,
    ) -> None:
        self._host = host
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._loop = asyncio.new_event_loop()
        self.store = StoreState(capacity, units, order, self._loop, mirrored=mirrored)
        self._watching: list[futures.Future[None]] = []
        self._authenticated = 0
        self._pending: dict[asyncio.StreamWriter, None] = {}
        """Connections that have not sent the token yet, oldest first."""
        self._max_connections = max_connections()

    def start(self) -> Address:
        """Start serving until the process ends; return the address.

        Raises:
            UnavailableError: it cannot listen on the host.
        """
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            listener = socket.create_server((self._host, 0), family=family)
        except OSError as error:
            raise UnavailableError(
                f"the partition directory cannot listen on {self._host}: {error}"
            ) from error
        port: int = listener.getsockname()[1]
        threading.Thread(target=self._serve, args=(listener,), daemon=True).start()
        return Address(self._host, port, self._token)

    def _serve(self, listener: socket.socket) -> None:
        asyncio.set_event_loop(self._loop)
        # asyncio accepts up to `backlog` connections in a row and serves no request meanwhile. So
        # it gets a small number here, and the kernel a larger one below.
        self._loop.run_until_complete(
            asyncio.start_server(self._connected, sock=listener, backlog=_ACCEPTED_AT_ONCE)
        )
        listener.listen(_BACKLOG)
        # Garbage collections would be the directory's worst latencies. Collections of young
        # objects stay below a millisecond; full ones, over the ledger's many objects, become rare.
        gc.collect()
        gc.freeze()
        gc.set_threshold(1_000, 5, 200_000)
        self._loop.run_forever()

    def watch(self, units: Iterable[UnitAddress], token: bytes) -> None:
        """Fail every request as soon as a unit is gone; safe in any thread."""
        for unit in units:
            watched = asyncio.run_coroutine_threadsafe(self._watch(unit, token), self._loop)
            self._watching.append(watched)

    async def _watch(self, unit: UnitAddress, token: bytes) -> None:
        self.store.fail(UnavailableError(await wait_until_gone(unit, token)))

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(self.store, reader, writer)
        if not self._admit(writer):
            self.store.log.warn("connection_refused", connection.peer, error="too many connections")
            writer.transport.abort()
            return
        try:
            token = await asyncio.wait_for(reader.readexactly(TOKEN_BYTES), _HANDSHAKE_S)
            self._pending.pop(writer, None)
            if not hmac.compare_digest(token, self._token):
                self.store.log.warn("connection_refused", connection.peer, error="wrong token")
                return
            self._authenticated += 1
            try:
                await connection.serve()
            finally:
                self._authenticated -= 1
        except (OSError, asyncio.IncompleteReadError):
            pass  # the peer disconnected, died or is silent: connections end like this
        except Exception as error:  # noqa: BLE001  # asyncio would log its complete text
            self.store.log.warn("connection_failed", connection.peer, error=fault(error))
        finally:
            self._pending.pop(writer, None)
            writer.close()

    def _admit(self, writer: asyncio.StreamWriter) -> bool:
        """Admit a connection; at the limit, abort the oldest one that has not sent the token."""
        if self._authenticated + len(self._pending) >= self._max_connections:
            if not self._pending:
                return False
            oldest = next(iter(self._pending))
            del self._pending[oldest]
            oldest.transport.abort()
        self._pending[writer] = None
        return True
