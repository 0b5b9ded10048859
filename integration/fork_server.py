"""Fork the worker processes of a Ray from a process that has imported what they need.

A worker of the trainer imports torch, tensordict and transformers, which takes seconds of CPU time,
most of what a small run needs. Here one process, the fork server, imports them once. Ray starts
this file in place of its ``setup_worker.py``: it gives its arguments, environment and open files to
the fork server, and a child of the fork server then runs Ray's own program for workers.

``python fork_server.py --serve LISTENER MODULE...`` is the fork server. LISTENER is the descriptor
of an inherited socket. The fork server ends when its standard input is closed, so at the latest
with the process that started it.
"""

from __future__ import annotations

import json
import os
import socket
import sys

ADDRESS = "RAY_FORK_SERVER"
"""Environment variable with the path of the fork server's socket."""

_CONTEXT = "--serialized-runtime-env-context="
_MAX_REQUEST_BYTES = 1 << 20
_TIMEOUT_S = 120.0


def _serve(descriptor: int, modules: list[str]) -> list[str]:
    """Fork a child for each request. In the child, return its program and the arguments."""
    import contextlib
    import gc
    import importlib
    import select
    import signal

    with socket.socket(fileno=descriptor) as listener:
        for name in modules:
            with contextlib.suppress(ImportError):  # not in this environment, so not in a worker
                importlib.import_module(name)
        # A child's collections would visit, and so copy, all that the modules hold.
        gc.freeze()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children leave no zombies
        while True:
            ready, _, _ = select.select([listener, sys.stdin], [], [])
            if sys.stdin in ready:
                os._exit(0)
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):  # Ray may have killed the caller
                connection.settimeout(_TIMEOUT_S)
                request, files = _receive(connection)
                if not os.fork():
                    break
                for file in files:
                    os.close(file)
                connection.sendall(b"1")
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    os.setpgid(0, 0)
    return list(request["arguments"])


def _receive(connection: socket.socket) -> tuple[dict, list[int]]:
    data, files, _, _ = socket.recv_fds(connection, _MAX_REQUEST_BYTES, 3)
    while not data.endswith(b"\n"):
        more = connection.recv(_MAX_REQUEST_BYTES)
        if not more:
            raise ConnectionError("the request is incomplete")
        data += more
    return json.loads(data), files


def _hand_over(arguments: list[str]) -> None:
    """Let the fork server run a worker. The arguments are those of Ray's ``setup_worker.py``."""
    context = "".join(each for each in arguments if each.startswith(_CONTEXT))
    environment = json.loads(context.removeprefix(_CONTEXT) or "{}").get("env_vars", {})
    request = {
        "arguments": [each for each in arguments if not each.startswith((_CONTEXT, "--language="))],
        "environment": {**os.environ, **environment},
        "folder": os.getcwd(),
    }
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_TIMEOUT_S)
        connection.connect(os.environ[ADDRESS])
        data = json.dumps(request).encode() + b"\n"
        sent = socket.send_fds(connection, [data], [0, 1, 2])
        connection.sendall(data[sent:])
        if not connection.recv(1):
            sys.exit("the fork server ended before it forked a worker")


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        import runpy

        sys.argv = _serve(int(sys.argv[2]), sys.argv[3:])
        sys.path[0] = os.path.dirname(sys.argv[0])
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        _hand_over(sys.argv[1:])
