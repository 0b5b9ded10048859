"""A process that imports vLLM once and forks a process for each line of its input.

The import takes most of a server's start, and a plain server does it in three processes. Here the
API server, its engine core and its workers are forks of one process that has imported everything
and has no other thread. Each fork leads a process group.

A request is one JSON object a line. The answer to ``{"target": "module:function", "arguments":
{...}, "environment": {...}, "log": path}`` is the pid. The answer to ``{"ended": pid}`` is its exit
code, or null while it runs. At the end of its input, the process kills all forks and exits.
"""

from __future__ import annotations

import gc
import importlib
import json
import multiprocessing
import os
import signal
import sys
import traceback
from contextlib import suppress
from typing import Any, NoReturn

_PRELOADED = (
    "refit_mx.source.publisher",
    "refit_mx.engine.registration",
    "safetensors.torch",
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.model_executor.models.qwen3",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
)
_FORKS: list[int] = []


def main() -> None:
    """Answer the requests on standard input."""
    for name in _PRELOADED:
        importlib.import_module(name)
    gc.freeze()  # a fork's collections would visit, and so copy, all that the modules hold
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise RuntimeError(f"the imports started {threads - 1} threads, which a fork would lose")
    print("ready", flush=True)
    try:
        _answer_requests()
    finally:
        for pid in _FORKS:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


def _answer_requests() -> None:
    codes: dict[int, int] = {}
    for line in sys.stdin:
        request = json.loads(line)
        if "ended" in request:
            pid = request["ended"]
            with suppress(ChildProcessError):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[pid] = os.waitstatus_to_exitcode(status)
            print(json.dumps(codes.get(pid)), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            _run(request)
        _FORKS.append(pid)
        print(pid, flush=True)


def _run(request: dict[str, Any]) -> NoReturn:
    """Run the requested function in this fork, then exit."""
    code = 1
    try:
        os.setsid()
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(request["environment"])
        module, function = request["target"].split(":")
        getattr(importlib.import_module(module), function)(**request["arguments"])
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001 - written to the log; the process ends
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def serve(options: list[str]) -> None:
    """Run vLLM's HTTP server, like ``vllm serve`` with these options."""
    import uvloop
    from vllm.entrypoints.launchers.api_server.entry import run_server
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    # vLLM's CPU platform requests "spawn", which would import everything again.
    fork = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda method=None: fork  # type: ignore[assignment]
    sys.argv = ["vllm", *options]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args()
    validate_parsed_serve_args(args)
    uvloop.run(run_server(args))


if __name__ == "__main__":
    main()
