"""An HTTP server that answers with a test's bytes, for answers that vLLM cannot be made to give."""

from __future__ import annotations

import asyncio
import json
import threading


def json_answer(value, status="200 OK"):
    """Return the bytes of an answer with a JSON body."""
    body = json.dumps(value).encode()
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


class ScriptedServer:
    """An HTTP server in a thread, until it is closed.

    Args:
        answer: function of the method, the path and the JSON body. It returns an iterable of bytes
            to send and of floats, which are pauses in seconds.
    """

    def __init__(self, answer):
        self.requests = []
        self._answer = answer
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        started = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._serve, "127.0.0.1", 0), self._loop
        )
        self._server = started.result(10)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader, writer):
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            method, path, _ = head.split(" ", 2)
            length = [line for line in head.lower().splitlines() if "content-length:" in line]
            size = int(length[0].split(":")[1]) if length else 0
            body = json.loads(await reader.readexactly(size)) if size else None
            self.requests.append((method, path.partition("?")[0]))
            for part in self._answer(method, path, body):
                if isinstance(part, float):
                    await asyncio.sleep(part)
                else:
                    writer.write(part)
                    await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client has closed
        finally:
            writer.close()

    def close(self):
        """Stop listening and end the thread."""

        async def end():
            self._server.close()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()
