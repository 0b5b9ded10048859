"""`Engine`: TransferQueue's client with a deadline on every call.

TransferQueue's synchronous client has no time-outs. The engine runs its asynchronous client on a
dedicated loop thread. While the caller waits, it regularly asks Ray whether the actors are alive,
so a killed actor is reported long before the deadline. The thread also shields the caller from
TransferQueue's changes of torch's thread count, which is per thread.
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

import ray
import zmq
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError

from dataplane_core import (
    ClosedError,
    DataPlaneError,
    DeadlineExceededError,
    UnavailableError,
)
from dataplane_tq.ray_errors import reason_of
from dataplane_tq.upstream import AsyncTransferQueueClient

T = TypeVar("T")

# With fewer than eight cores, TransferQueue warns in every call about a default that it set.
logging.getLogger("transfer_queue.utils.common").setLevel(logging.ERROR)

FAILURES = (RuntimeError, ValueError, KeyError, OSError, ImportError, zmq.ZMQError)
"""Errors of TransferQueue's client, and of the libraries of its storage backends."""

_CHECK_S = 0.5
_STOP_S = 1.0
_PROBE_S = 1.0


class Engine:
    """Connection of one process to the controller and the storage backend.

    Args:
        controller: TransferQueue's description of the controller's sockets.
        manager: name of TransferQueue's storage manager.
        storage: configuration of the storage manager.
        actors: name to Ray handle of every actor that operations depend on.
        timeout_s: deadline of one call, in seconds.
    """

    def __init__(
        self,
        controller: Any,
        manager: str,
        storage: dict[str, Any],
        actors: Mapping[str, Any],
        *,
        timeout_s: float,
    ) -> None:
        self.timeout_s = timeout_s
        self._actors = dict(actors)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="dataplane-tq", daemon=True)
        self._thread.start()
        try:
            self.client: AsyncTransferQueueClient = self.run(
                "connect", self._connect, controller, manager, storage
            )
        except BaseException:  # the caller gets no engine that it could close
            self._stop_loop()
            raise

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    @staticmethod
    async def _connect(
        controller: Any, manager: str, storage: dict[str, Any]
    ) -> AsyncTransferQueueClient:
        client = AsyncTransferQueueClient(
            client_id=f"dataplane_tq_{uuid.uuid4().hex[:8]}",
            controller_info=controller,
        )
        # The handshake blocks, so it runs in a thread and not on the loop.
        await asyncio.to_thread(
            client.initialize_storage_manager,
            manager_type=manager,
            config=storage,
        )
        return client

    def run(
        self,
        what: str,
        function: Callable[..., Coroutine[Any, Any, T]],
        *args: Any,
        **kwargs: Any,
    ) -> T:
        """Run a coroutine function on the loop and return its result: `submit`, then `wait`."""
        return self.wait(what, self.submit(function, *args, **kwargs))

    def submit(
        self, function: Callable[..., Coroutine[Any, Any, T]], *args: Any, **kwargs: Any
    ) -> futures.Future[T]:
        """Start a coroutine function on the loop."""
        return asyncio.run_coroutine_threadsafe(function(*args, **kwargs), self._loop)

    def wait(self, what: str, future: futures.Future[T], *, cancel: bool = True) -> T:
        """Wait for a future of `submit` and return its result.

        Args:
            what: the operation, for error messages.
            future: future of `submit`.
            cancel: whether to cancel the future if the wait fails.

        Raises:
            UnavailableError: an actor is dead, or the operation failed.
            DeadlineExceededError: the deadline expired, though all actors are alive.
            ClosedError: `close` was called meanwhile.
        """
        deadline = time.monotonic() + self.timeout_s
        try:
            while True:
                remaining = deadline - time.monotonic()
                done, _ = futures.wait([future], timeout=max(0.0, min(_CHECK_S, remaining)))
                if done:
                    return future.result()
                if remaining <= 0:
                    raise DeadlineExceededError(
                        f"{what}: no answer from TransferQueue after {self.timeout_s:g} s; raise "
                        "ack_timeout_ms if batches of this size take longer"
                    )
                self.check_alive(what)
        except DataPlaneError:
            if cancel:
                future.cancel()
            raise
        except futures.CancelledError:
            raise ClosedError(f"{what}: the TransferQueue client was closed") from None
        except FAILURES as error:
            self.check_alive(what)
            raise UnavailableError(f"{what}: TransferQueue failed: {error}") from error

    def check_alive(self, what: str) -> None:
        """Raise `UnavailableError` naming the first actor that Ray knows to be dead."""
        dead = first_dead(self._actors)
        if dead is not None:
            raise UnavailableError(f"{what}: {dead}")

    def close(self) -> None:
        """Stop the loop and close the connection; the actors continue to run."""
        self._stop_loop()
        self.client.close()

    def _stop_loop(self) -> None:
        # Operations past their deadline may still be waiting for a part that does not answer.
        cancelled = asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop)
        futures.wait([cancelled], timeout=_STOP_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5.0)
        if not self._thread.is_alive():
            self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def first_dead(actors: Mapping[str, Any]) -> str | None:
    """Return a sentence about the first actor that Ray knows to be dead; None if there is none.

    Ray imports the actors' classes into this process, because it holds their handles.
    """
    if not ray.is_initialized():
        return "Ray was shut down in this process"  # a remote call would start a new cluster
    probes = {}
    for name, actor in actors.items():
        try:
            probes[name] = actor.__ray_ready__.remote()
        except Exception as error:  # noqa: BLE001  # a handle of an earlier cluster raises any type
            return f"{name} is gone: {reason_of(error)}"
    ready, _ = ray.wait(list(probes.values()), num_returns=len(probes), timeout=_PROBE_S)
    for name, probe in probes.items():
        if probe in ready:
            try:
                ray.get(probe, timeout=_PROBE_S)
            except ActorDiedError as error:
                return f"{name} is dead: {reason_of(error)}"
            except (ActorUnavailableError, GetTimeoutError):
                continue  # Ray reports these as transient
    return None
