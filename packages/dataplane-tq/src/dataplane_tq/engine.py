"""`Engine`: TransferQueue's client with a deadline on every call.

TransferQueue's synchronous client waits without end. This one runs its asynchronous client on a
loop thread of its own; the caller waits for the result in short turns, and between them asks Ray
whether the actors are alive, so that a killed one is reported long before the deadline. The thread
also keeps TransferQueue's changes of torch's thread count, which is per thread, from the caller.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping
from concurrent import futures
from typing import Any, TypeVar  # Any: TransferQueue and Ray handles have no static types

import zmq

from dataplane_core import DataPlaneError, DeadlineExceededError, UnavailableError
from dataplane_tq.liveness import first_dead
from dataplane_tq.packed import manager  # noqa: F401  # enters TransferQueue's registry
from dataplane_tq.topology import Connection
from dataplane_tq.upstream import AsyncTransferQueueClient

T = TypeVar("T")

# On a machine with fewer than eight cores it warns about its own default in every call.
logging.getLogger("transfer_queue.utils.common").setLevel(logging.ERROR)

_TURN_S = 0.5
_STOP_S = 1.0


class Engine:
    """One process's connection to the controller and the storage backend.

    Args:
        connection: how to connect, see `dataplane_tq.topology`.
        actors: name to Ray handle of every actor that operations depend on.
        timeout_s: deadline of one operation, in seconds.
    """

    def __init__(
        self, connection: Connection, actors: Mapping[str, Any], *, timeout_s: float
    ) -> None:
        self.timeout_s = timeout_s
        self._actors = dict(actors)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="dataplane-tq", daemon=True)
        self._thread.start()
        try:
            self.client: AsyncTransferQueueClient = self.run("connect", self._connect, connection)
        except DataPlaneError:
            self._stop_loop()
            raise

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    @staticmethod
    async def _connect(connection: Connection) -> AsyncTransferQueueClient:
        client = AsyncTransferQueueClient(
            client_id=f"dataplane_tq_{uuid.uuid4().hex[:8]}",
            controller_info=connection.controller,
        )
        # The handshake blocks, so it must not run on the loop that may have to be abandoned.
        await asyncio.to_thread(
            client.initialize_storage_manager,
            manager_type=connection.manager,
            config=connection.storage,
        )
        return client

    def run(
        self,
        what: str,
        function: Callable[..., Coroutine[Any, Any, T]],
        *args: Any,
        **kwargs: Any,
    ) -> T:
        """Run a coroutine function on the loop to its end; as `wait` of `submit`."""
        return self.wait(what, self.submit(function, *args, **kwargs))

    def submit(
        self, function: Callable[..., Coroutine[Any, Any, T]], *args: Any, **kwargs: Any
    ) -> futures.Future[T]:
        """Start a coroutine function on the loop."""
        return asyncio.run_coroutine_threadsafe(function(*args, **kwargs), self._loop)

    def wait(self, what: str, future: futures.Future[T], *, cancel: bool = True) -> T:
        """Wait for what `submit` started.

        Args:
            what: the operation, for error messages.
            future: of `submit`.
            cancel: end what was started if waiting for it fails.

        Raises:
            UnavailableError: an actor is dead, or the operation failed.
            DeadlineExceededError: it did not finish in time, though all actors live.
        """
        deadline = time.monotonic() + self.timeout_s
        try:
            while True:
                remaining = deadline - time.monotonic()
                done, _ = futures.wait([future], timeout=max(0.0, min(_TURN_S, remaining)))
                if done:
                    return future.result()
                if remaining <= 0:
                    raise DeadlineExceededError(
                        f"{what}: no answer from TransferQueue after {self.timeout_s:g} s; raise "
                        "ack_timeout_ms if the batch is that large"
                    )
                self.check_alive(what)
        except DataPlaneError:
            if cancel:
                future.cancel()
            raise
        except (RuntimeError, ValueError, KeyError, OSError, zmq.ZMQError) as error:
            self.check_alive(what)
            raise UnavailableError(f"{what}: TransferQueue failed: {error}") from error

    def check_alive(self, what: str) -> None:
        """Raise `UnavailableError` naming the first actor that Ray knows to be dead."""
        dead = first_dead(self._actors)
        if dead is not None:
            raise UnavailableError(f"{what}: {dead}")

    def close(self) -> None:
        """Stop the loop and close the connection; the actors are not touched."""
        self._stop_loop()
        self.client.close()

    def _stop_loop(self) -> None:
        # Operations whose deadline passed may still be waiting for a part that does not answer.
        ended = asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop)
        futures.wait([ended], timeout=_STOP_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5.0)
        if not self._thread.is_alive():
            self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
