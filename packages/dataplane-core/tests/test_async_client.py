"""The awaited client keeps the contract of the one inside it, and loses nothing when cancelled.

Imports internals: the log of a lost claim is captured by a patch of the logger.
"""

import asyncio
import inspect
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest
import structlog
import torch
from tensordict import TensorDict

from dataplane_core import (
    AsyncDataPlaneClient,
    ClaimTimeoutError,
    ClosedError,
    DataPlaneClient,
    DeadlineExceededError,
    InMemoryDataPlaneClient,
    InvalidRequestError,
    async_client,
)
from dataplane_core.testing import (
    BackpressureContract,
    LeaseContract,
    NamedClaimContract,
    OriginContract,
)
from dataplane_core.testing.claims import ClaimContract

TIMEOUT_S = 20.0


class Driven(DataPlaneClient):
    """Async client behind the synchronous interface."""

    def __init__(self, inner: DataPlaneClient, loop: asyncio.AbstractEventLoop) -> None:
        self._inner = inner
        self._client = AsyncDataPlaneClient(inner)
        self._loop = loop

    @property
    def capabilities(self):
        return self._client.capabilities

    @property
    def inspector(self):
        return self._inner.inspector

    def _drive(self, name, args, kwargs):
        call = getattr(self._client, name)(*args, **kwargs)
        return asyncio.run_coroutine_threadsafe(call, self._loop).result(60)


def _driven(name: str) -> Callable:
    def call(self, *args, **kwargs):
        return self._drive(name, args, kwargs)

    return call


METHODS = [
    name
    for name, _ in inspect.getmembers(DataPlaneClient, inspect.isfunction)
    if not name.startswith("_")
]
for _name in METHODS:
    setattr(Driven, _name, _driven(_name))
Driven.__abstractmethods__ = frozenset()


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join(TIMEOUT_S)


class TestAwaited(ClaimContract, OriginContract):
    @pytest.fixture
    def client(self, loop) -> Iterator[DataPlaneClient]:
        with Driven(InMemoryDataPlaneClient(), loop) as client:
            yield client

    @pytest.fixture
    def peer(self, client, loop) -> Iterator[DataPlaneClient]:
        with Driven(InMemoryDataPlaneClient(bootstrap=False), loop) as peer:
            yield peer


class MakeAwaited:
    @pytest.fixture
    def make_client(self, loop):
        clients = []

        def make(**config):
            inner = InMemoryDataPlaneClient({"enabled": True, "impl": "in_memory", **config})
            clients.append(Driven(inner, loop))
            return clients[-1]

        yield make
        for client in clients:
            client.close()


class TestAwaitedLeases(MakeAwaited, LeaseContract, NamedClaimContract):
    pass


class TestAwaitedBackpressure(MakeAwaited, BackpressureContract):
    pass


def store(**config) -> InMemoryDataPlaneClient:
    client = InMemoryDataPlaneClient({"enabled": True, "impl": "in_memory", **config})
    client.register_partition("train", ["x"], 1000, ["train", "other"])
    return client


def ones(count: int) -> TensorDict:
    return TensorDict({"x": torch.ones(count)}, [count])


def begun(calls: set[Future]) -> bool:
    """Return whether a call runs in its thread, where a cancellation cannot stop it."""
    return any(call.running() for call in calls)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.002)


def test_every_method_has_the_signature_of_the_synchronous_one():
    for name in METHODS:
        sync, awaited = getattr(DataPlaneClient, name), getattr(AsyncDataPlaneClient, name)
        assert inspect.iscoroutinefunction(awaited)
        assert inspect.signature(awaited) == inspect.signature(sync)


def test_hundred_blocked_claims_block_no_other_call():
    async def scenario():
        async with AsyncDataPlaneClient(store(), threads=2) as client:
            claims = [
                asyncio.create_task(client.claim_meta("train", "train", ["x"], 1))
                for _ in range(100)
            ]
            await until(lambda: client._claim_slots._value <= 156)
            ids = [f"s{i}" for i in range(100)]
            await asyncio.wait_for(client.put_samples(ids, "train", ones(100)), TIMEOUT_S)
            answer = await client.get_samples(ids, "train", ["x"])
            assert answer.batch_size == (100,)
            async with asyncio.timeout(TIMEOUT_S):
                claimed = [sample_id for claim in claims for sample_id in (await claim).sample_ids]
            assert sorted(claimed) == sorted(ids)

    asyncio.run(scenario())


def test_blocked_puts_do_not_block_the_clear_that_frees_capacity():
    async def scenario():
        inner = store(storage_capacity=1, ack_timeout_ms=int(TIMEOUT_S * 1000))
        async with AsyncDataPlaneClient(inner, threads=1) as client:
            await client.put_samples(["a"], "train", ones(1))
            waiting = asyncio.create_task(client.put_samples(["b"], "train", ones(1)))
            await asyncio.sleep(0)
            await asyncio.wait_for(client.clear_samples(["a"], "train"), TIMEOUT_S / 2)
            assert (await waiting).sample_ids == ["b"]

    asyncio.run(scenario())


def test_claim_beyond_claim_threads_ends_at_its_deadline():
    async def scenario():
        inner = store()
        async with AsyncDataPlaneClient(inner, claim_threads=1) as client:
            first = asyncio.create_task(client.claim_meta("train", "train", ["x"], 1))
            await until(client._claim_slots.locked)
            with pytest.raises(ClaimTimeoutError, match="raise claim_threads"):
                await client.claim_meta("train", "train", ["x"], 1, timeout_s=0.02)
            now = await client.claim_meta("train", "train", ["x"], 1, blocking=False)
            assert now.size == 0
            inner.put_samples(["a", "b"], "train", ones(2))
            assert (await first).size == 1
            assert (await client.claim_meta("train", "train", ["x"], 1)).size == 1

    asyncio.run(scenario())


def test_cancelled_claim_is_released_when_it_succeeds_later():
    async def scenario():
        inner = store(claim_lease_s=1000.0)
        async with AsyncDataPlaneClient(inner) as client:
            before = time.monotonic()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.02):
                    await client.claim_meta("train", "train", ["x"], 2, timeout_s=TIMEOUT_S)
            assert time.monotonic() - before < TIMEOUT_S / 4
            inner.put_samples(["a", "b"], "train", ones(2))
            # When nothing runs, the cancelled claim and its release are finished.
            await until(lambda: not client._running)
            again = await client.claim_meta("train", "train", ["x"], 2, timeout_s=TIMEOUT_S)
            assert sorted(again.sample_ids) == ["a", "b"]
            assert inner.inspector.count_samples("train", "train", ["x"]).leased == 2

    asyncio.run(scenario())


def test_claim_cancelled_before_its_delivery_is_released():
    async def scenario():
        inner = store(claim_lease_s=1000.0)
        async with AsyncDataPlaneClient(inner) as client:
            claim = asyncio.create_task(client.claim_meta("train", "train", ["x"], 1))
            await asyncio.sleep(0)  # Python 3.14 would deliver a claim that ends before its await
            inner.put_samples(["a"], "train", ones(1))
            deadline = time.monotonic() + TIMEOUT_S
            # The loop does not run meanwhile, so the task cannot have got the result.
            while inner.inspector.count_samples("train", "train", ["x"]).leased == 0:
                assert time.monotonic() < deadline
            claim.cancel()
            with pytest.raises(asyncio.CancelledError):
                await claim
            await until(lambda: inner.inspector.count_samples("train", "train", ["x"]).ready == 1)

    asyncio.run(scenario())


def test_a_cancelled_claim_without_lease_is_logged_with_its_ids(monkeypatch):
    # A separate logger, because structlog may be configured to cache loggers in this process.
    capturing = structlog.testing.CapturingLogger()
    monkeypatch.setattr(async_client, "logger", capturing)

    async def scenario():
        inner = store()
        async with AsyncDataPlaneClient(inner) as client:
            claim = asyncio.create_task(client.claim_meta("train", "train", ["x"], 2))
            await until(lambda: begun(client._blocked))
            claim.cancel()
            with pytest.raises(asyncio.CancelledError):
                await claim
            inner.put_samples(["a", "b"], "train", ones(2))
            await until(lambda: not client._running)
        [line] = capturing.calls
        assert (line.args, line.kwargs["sample_ids"]) == (("claimed_samples_lost",), ["a", "b"])
        assert "no lease" in line.kwargs["reason"]

    asyncio.run(scenario())


def test_cancelled_put_stores_all_or_nothing():
    async def scenario():
        inner = store(storage_capacity=2, ack_timeout_ms=int(TIMEOUT_S * 1000))
        async with AsyncDataPlaneClient(inner) as client:
            await client.put_samples(["a"], "train", ones(1))
            put = asyncio.create_task(client.put_samples(["b", "c"], "train", ones(2)))
            await until(lambda: begun(client._running))
            put.cancel()
            with pytest.raises(asyncio.CancelledError):
                await put
            await client.clear_samples(["a"], "train")
            await until(lambda: not client._running)
            assert (await client.get_samples(["b", "c"], "train", ["x"])).batch_size == (2,)

    asyncio.run(scenario())


def test_closing_lets_calls_finish_and_ends_blocked_claims():
    async def scenario():
        client = AsyncDataPlaneClient(store())
        claim = asyncio.create_task(client.claim_meta("train", "train", ["x"], 1))
        await until(lambda: bool(client._blocked))
        put = asyncio.create_task(client.put_samples(["a"], "other-partition"))
        await client.close()
        await client.close()
        for call, error in ((claim, ClosedError), (put, (KeyError, ClosedError))):
            with pytest.raises(error):
                await call
        with pytest.raises(ClosedError):
            await client.read_origins(["a"], "train", ["x"])

    asyncio.run(scenario())


class Stuck(InMemoryDataPlaneClient):
    """A client whose `read_origins` hangs until the test ends it."""

    def __init__(self):
        super().__init__()
        self.over = threading.Event()

    def read_origins(self, sample_ids, partition_id, fields):
        self.over.wait(TIMEOUT_S)
        return {}


def test_close_with_a_hanging_call_raises_at_the_deadline():
    async def scenario():
        inner = Stuck()
        client = AsyncDataPlaneClient(inner, close_timeout_s=0.05)
        stuck = asyncio.create_task(client.read_origins(["a"], "train", ["x"]))
        await until(lambda: bool(client._running))
        with pytest.raises(DeadlineExceededError, match="1 calls"):
            await client.close()
        inner.over.set()
        assert await stuck == {}

    asyncio.run(scenario())


def test_close_ends_blocked_claims_although_other_calls_hang():
    async def scenario():
        inner = Stuck()
        inner.register_partition("train", ["x"], 1, ["train"])
        client = AsyncDataPlaneClient(inner, threads=1, close_timeout_s=0.05)
        stuck = asyncio.create_task(client.read_origins(["a"], "train", ["x"]))
        claim = asyncio.create_task(client.claim_meta("train", "train", ["x"], 1))
        await until(lambda: bool(client._blocked) and len(client._running) == 2)
        with pytest.raises(DeadlineExceededError):
            await client.close()
        with pytest.raises(ClosedError):
            await claim
        assert not stuck.done()
        inner.over.set()
        assert await stuck == {}

    asyncio.run(scenario())


def test_close_that_was_cancelled_can_be_repeated():
    async def scenario():
        inner = Stuck()
        client = AsyncDataPlaneClient(inner, close_timeout_s=TIMEOUT_S)
        stuck = asyncio.create_task(client.read_origins(["a"], "train", ["x"]))
        await until(lambda: bool(client._running))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.close(), 0.05)
        inner.over.set()
        await client.close()
        assert await stuck == {}
        with pytest.raises(ClosedError):
            inner.register_partition("train", ["x"], 1, ["train"])

    asyncio.run(scenario())


def test_zero_threads_is_refused():
    with pytest.raises(InvalidRequestError, match="threads is 0"):
        AsyncDataPlaneClient(InMemoryDataPlaneClient(), threads=0)
