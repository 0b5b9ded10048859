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

import ray
import zmq
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from transfer_queue.client import AsyncTransferQueueClient

from dataplane_core import DataPlaneError, DeadlineExceededError, UnavailableError

T = TypeVar("T")

# On a machine with fewer than eight cores it warns about its own default in every call.
logging.getLogger("transfer_queue.utils.common").setLevel(logging.ERROR)

_TURN_S = 0.5
_PROBE_S = 1.0


class Engine:
    """One process's connection to the controller, the storage units and the directory.

    Args:
        topology: what the directory stored, see `dataplane_tq.topology`.
        actors: name to Ray handle of every actor that operations depend on.
        timeout_s: deadline of one operation, in seconds.
    """

    def __init__(
        self, topology: Mapping[str, Any], actors: Mapping[str, Any], *, timeout_s: float
    ) -> None:
        self.timeout_s = timeout_s
        self._actors = dict(actors)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="dataplane-tq", daemon=True)
        self._thread.start()
        try:
            self.client: AsyncTransferQueueClient = self.run("connect", self._connect, topology)
        except DataPlaneError:
            self._stop_loop()
            raise

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    @staticmethod
    async def _connect(topology: Mapping[str, Any]) -> AsyncTransferQueueClient:
        client = AsyncTransferQueueClient(
            client_id=f"dataplane_tq_{uuid.uuid4().hex[:8]}",
            controller_info=topology["controller"],
        )
        # The handshake blocks, so it must not run on the loop that may have to be abandoned.
        await asyncio.to_thread(
            client.initialize_storage_manager,
            manager_type=topology["manager"],
            config=topology["backend"],
        )
        return client

    def run(
        self,
        what: str,
        function: Callable[..., Coroutine[Any, Any, T]],
        *args: Any,
        **kwargs: Any,
    ) -> T:
        """Run a coroutine function of TransferQueue's client to its end.

        Args:
            what: the operation, for error messages.
            function: the coroutine function.
            args: its positional arguments.
            kwargs: its keyword arguments.

        Raises:
            UnavailableError: an actor is dead, or the operation failed.
            DeadlineExceededError: it did not finish in time, though all actors live.
        """
        future = asyncio.run_coroutine_threadsafe(function(*args, **kwargs), self._loop)
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
            future.cancel()
            raise
        except (RuntimeError, ValueError, KeyError, OSError, zmq.ZMQError) as error:
            self.check_alive(what)
            raise UnavailableError(f"{what}: TransferQueue failed: {error}") from error

    def ask(self, what: str, method: Any, *args: Any, timeout_s: float | None = None) -> Any:
        """Call a method of the directory and wait for its answer.

        Args:
            what: the operation, for error messages.
            method: the actor handle's method.
            args: its arguments.
            timeout_s: deadline in seconds; the engine's own if None.

        Raises:
            DataPlaneError: whatever the actor raised of our tree.
            UnavailableError: the actor is dead.
            DeadlineExceededError: it did not answer in time.
        """
        limit = self.timeout_s if timeout_s is None else timeout_s
        try:
            return ray.get(method.remote(*args), timeout=limit)
        except GetTimeoutError:
            self.check_alive(what)
            raise DeadlineExceededError(
                f"{what}: no answer from the partition directory after {limit:g} s"
            ) from None
        except RayTaskError as error:
            if isinstance(error.cause, DataPlaneError):
                raise error.cause from None
            raise UnavailableError(f"{what}: the partition directory failed: {error}") from error
        except RayError as error:
            raise UnavailableError(
                f"{what}: the partition directory is gone: {_first_line(error)}"
            ) from error

    def check_alive(self, what: str) -> None:
        """Raise `UnavailableError` naming the first actor that Ray knows to be dead."""
        probes = {name: actor.__ray_ready__.remote() for name, actor in self._actors.items()}
        ready, _ = ray.wait(list(probes.values()), num_returns=len(probes), timeout=_PROBE_S)
        for name, probe in probes.items():
            if probe not in ready:
                continue
            try:
                ray.get(probe)
            except RayActorError as error:
                raise UnavailableError(f"{what}: {name} is dead: {_first_line(error)}") from error

    def close(self) -> None:
        """Stop the loop and close the connection; the actors are not touched."""
        self._stop_loop()
        self.client.close()

    def _stop_loop(self) -> None:
        # Operations whose deadline passed may still be waiting for a part that does not answer.
        ended = asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop)
        futures.wait([ended], timeout=_PROBE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5.0)


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
