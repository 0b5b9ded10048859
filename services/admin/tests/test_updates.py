"""Live updates: notified of changes, bounded in number, and ended at shutdown."""

import asyncio
import json
import resource
import signal
import sys
import urllib.request

import pytest

TIMEOUT_S = 60.0
MAX_STREAMS = 20
SERVICE = f"""
from dataplane_admin import Settings, create_app, serve
from dataplane_admin.serving import connections

# Ten thousand clients of one process need a long time to send their requests.
connections.REQUEST_S = 60.0
app = create_app(Settings(store_url="sqlite:///live.sqlite", max_subscribers={MAX_STREAMS}))
serve(app, port=0, shutdown_timeout_s=30)
"""
REQUEST = b"GET /api/v1/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
SPAN = {
    "resourceSpans": [
        {
            "scopeSpans": [
                {
                    "spans": [
                        {
                            "traceId": "0af7651916cd43dd8448eb211c80319c",
                            "spanId": "b7ad6b7169203331",
                            "name": "a",
                            "startTimeUnixNano": "1",
                            "endTimeUnixNano": "2",
                        }
                    ]
                }
            ]
        }
    ]
}


@pytest.fixture
def service(start):
    return start(command=(sys.executable, "-c", SERVICE))


async def subscribe(port):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(REQUEST)
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), TIMEOUT_S)
    return head, reader, writer


async def next_change(reader):
    while True:
        line = await asyncio.wait_for(reader.readline(), TIMEOUT_S)
        assert line, "the stream ended"
        if line.startswith(b"data: "):
            return json.loads(line.removeprefix(b"data: "))


def post(url):
    request = urllib.request.Request(
        f"{url}/v1/traces",
        data=json.dumps(SPAN).encode(),
        headers={"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        assert answer.status == 200


def test_subscribers_are_notified_of_changes(service):
    async def wait():
        head, reader, writer = await subscribe(service.port)
        assert head.startswith(b"HTTP/1.1 200")
        assert b"content-type: text/event-stream" in head
        first = await next_change(reader)
        await asyncio.to_thread(post, service.url)
        second = await next_change(reader)
        assert second["store"] > first["store"]
        writer.close()

    asyncio.run(wait())


@pytest.mark.parametrize("many", [1_000, pytest.param(10_000, marks=pytest.mark.long)])
def test_too_many_subscribers_are_refused_and_pages_work(service, many):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    many = min(many, hard - 500)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, many + 500), hard))
    kept, refused = [], []

    async def follow(semaphore):
        async with semaphore:
            head, reader, writer = await subscribe(service.port)
            if head.startswith(b"HTTP/1.1 200"):
                kept.append(writer)
                return
            assert head.startswith(b"HTTP/1.1 503"), head
            assert b"application/problem+json" in head
            refused.append(await asyncio.wait_for(reader.read(), TIMEOUT_S))
            writer.close()

    async def subscribe_all():
        semaphore = asyncio.Semaphore(many)
        await asyncio.gather(*(follow(semaphore) for _ in range(many)))
        with await asyncio.to_thread(urllib.request.urlopen, f"{service.url}/healthz") as answer:
            assert answer.status == 200
        for writer in kept:
            writer.close()
        # The closed connections leave free capacity for new subscribers.
        deadline = asyncio.get_running_loop().time() + TIMEOUT_S
        while True:
            head, _, writer = await subscribe(service.port)
            writer.close()
            if head.startswith(b"HTTP/1.1 200"):
                return
            assert asyncio.get_running_loop().time() < deadline

    try:
        asyncio.run(subscribe_all())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (len(kept), len(refused)) == (MAX_STREAMS, many - MAX_STREAMS)
    assert b"20 of at most 20 connections" in refused[0]


def test_the_stop_does_not_wait_for_subscribers(service):
    async def wait():
        _, reader, _ = await subscribe(service.port)
        await next_change(reader)
        stopping = asyncio.create_task(asyncio.to_thread(service.stop, signal.SIGTERM))
        await asyncio.wait_for(reader.read(), TIMEOUT_S)  # ends
        return await stopping

    status, seconds, _ = asyncio.run(wait())
    assert status == 0
    assert seconds < 20


def test_a_subscriber_during_shutdown_is_refused_with_a_reason(job):
    job.app.state.updates.end()
    answer = job.client.get("/api/v1/live")
    assert answer.status_code == 503
    assert answer.json()["detail"] == "the service is shutting down; retry later"
