"""Live updates: told of changes, bounded in number however many come, and ended at shutdown."""

import asyncio
import json
import resource
import signal
import sys
import urllib.request

import pytest

PATIENCE_S = 60.0
MOST = 20
SERVICE = f"""
from dataplane_admin import Settings, connections, create_app
from dataplane_admin.listen import listen, resolve
from dataplane_admin.server import end_in_peace_on_signals, run

# Ten thousand clients of one process take their time to send what they ask.
connections.REQUEST_S = 60.0
app = create_app(Settings(store_url="sqlite:///live.sqlite", most_subscribers={MOST}))
end_in_peace_on_signals()
listener, bound = listen(resolve("127.0.0.1", 0))
print(f"http://{{bound}}", flush=True)
run(app, listener, shutdown_timeout_s=30)
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
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
    return head, reader, writer


async def next_change(reader):
    while True:
        line = await asyncio.wait_for(reader.readline(), PATIENCE_S)
        assert line, "the stream has ended"
        if line.startswith(b"data: "):
            return json.loads(line.removeprefix(b"data: "))


def post(url):
    request = urllib.request.Request(
        f"{url}/v1/traces",
        data=json.dumps(SPAN).encode(),
        headers={"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        assert answer.status == 200


def test_what_arrives_is_told_to_those_who_wait(service):
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


def test_ten_thousand_at_once_are_refused_beyond_the_bound_and_pages_go_on(service):
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    many = min(10_000, hard - 500)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, many + 500), hard))
    kept, refused = [], []

    async def one(gate):
        async with gate:
            head, reader, writer = await subscribe(service.port)
            if head.startswith(b"HTTP/1.1 200"):
                kept.append(writer)
                return
            assert head.startswith(b"HTTP/1.1 503"), head
            assert b"application/problem+json" in head
            refused.append(await asyncio.wait_for(reader.read(), PATIENCE_S))
            writer.close()

    async def come():
        gate = asyncio.Semaphore(many)
        await asyncio.gather(*(one(gate) for _ in range(many)))
        with await asyncio.to_thread(urllib.request.urlopen, f"{service.url}/healthz") as answer:
            assert answer.status == 200
        for writer in kept:
            writer.close()
        # Those who leave make room.
        deadline = asyncio.get_running_loop().time() + PATIENCE_S
        while True:
            head, _, writer = await subscribe(service.port)
            writer.close()
            if head.startswith(b"HTTP/1.1 200"):
                return
            assert asyncio.get_running_loop().time() < deadline

    try:
        asyncio.run(come())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (len(kept), len(refused)) == (MOST, many - MOST)
    assert b"expected fewer than 20" in refused[0]


def test_the_stop_does_not_wait_for_those_who_wait(service):
    async def wait():
        _, reader, _ = await subscribe(service.port)
        await next_change(reader)
        stopping = asyncio.create_task(asyncio.to_thread(service.stop, signal.SIGTERM))
        await asyncio.wait_for(reader.read(), PATIENCE_S)  # ends
        return await stopping

    status, seconds, _ = asyncio.run(wait())
    assert status == 0
    assert seconds < 20
