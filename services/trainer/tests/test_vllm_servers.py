"""Every process of a server ends with its worker, however that ends.

Small programs take vLLM's place here: what vLLM itself does is tested in `integration/vllm`. It
imports internals for this reason.
"""

from __future__ import annotations

import http.server
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from contextlib import nullcontext

import psutil
import pytest
from integration.waiting import wait_until

from grpo_trainer.errors import WorkerError
from grpo_trainer.rollout import vllm_guard, vllm_servers
from grpo_trainer.rollout.vllm_servers import VllmServers, devices_of
from grpo_trainer.rollout.vllm_worker import VllmWorker

pytestmark = pytest.mark.slow

TIMEOUT_S = 60.0

# An API server, and below it an engine that ignores SIGTERM and leaves the group.
SERVER = """
    import http.server, os, signal, sys, time
    if not os.fork():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.setsid()
        time.sleep(600)
    class Health(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
    port = int(sys.argv[sys.argv.index("--port") + 1])
    http.server.HTTPServer(("127.0.0.1", port), Health).serve_forever()
"""


@pytest.fixture
def program(tmp_path):
    """Function that writes a program, and returns the command that runs it."""

    def write(text):
        path = tmp_path / "server.py"
        path.write_text(textwrap.dedent(text))
        return [sys.executable, str(path)]

    return write


@pytest.fixture
def servers(tmp_path):
    """Function that makes `VllmServers` of a command."""

    def make(command, count=1, start_timeout_s=TIMEOUT_S):
        servers.append(
            VllmServers(
                command,
                count=count,
                environment={},
                token_env=None,
                folder=str(tmp_path),
                start_timeout_s=start_timeout_s,
            )
        )
        return servers[-1]

    servers = []
    yield make
    for each in servers:
        each.close()


def processes_in(folder):
    """Return the processes whose command line names a folder: servers and their guards."""
    processes = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if process.info["status"] == psutil.STATUS_ZOMBIE or process.pid == os.getpid():
            continue
        if any(str(folder) in part for part in process.info["cmdline"] or []):
            processes.append(process)
    return processes


def wait_for_end(folder):
    wait_until(lambda: not processes_in(folder), state=lambda: processes_in(folder))


def test_close_ends_all_processes_of_all_servers(servers, program, tmp_path):
    running = servers(program(SERVER), count=2)
    addresses = running.start()
    assert len(set(addresses)) == 2
    assert all(address.startswith("http://127.0.0.1:") for address in addresses)
    assert len(processes_in(tmp_path)) == 6  # a guard, a server and an engine each
    running.close()
    wait_for_end(tmp_path)


def test_server_that_ignores_sigterm_is_killed(servers, program, tmp_path):
    ignoring = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    running = servers(program(ignoring + textwrap.dedent(SERVER)))
    running.start()
    running.close()
    wait_for_end(tmp_path)


def test_engine_of_a_killed_server_does_not_stay(servers, program, tmp_path):
    running = servers(program(SERVER))
    running.start()
    [server] = running._servers
    os.kill(server.pid, signal.SIGKILL)
    wait_for_end(tmp_path)
    with pytest.raises(WorkerError, match=r"vLLM server 0 ended with status -9; .*vllm-0\.log"):
        server.answers()


def test_servers_end_with_a_killed_worker(program, tmp_path):
    worker = f"""
        import time
        from grpo_trainer.rollout.vllm_servers import VllmServers
        servers = VllmServers({program(SERVER)!r}, count=1, environment={{}}, token_env=None,
                              folder={str(tmp_path)!r}, start_timeout_s={TIMEOUT_S})
        print(servers.start(), flush=True)
        time.sleep(600)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(worker)], stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout.readline().startswith("['http://127.0.0.1:")
        # Kill the worker and its children, as Ray does.
        for each in [*psutil.Process(process.pid).children(), process]:
            each.kill()
    wait_for_end(tmp_path)


def test_a_server_that_ends_is_shown_with_its_log(servers, program):
    running = servers(program("raise SystemExit('no such model')"))
    named = r"^vLLM server 0 ended with status 1; .*vllm-0.log:\nno such model$"
    with pytest.raises(WorkerError, match=named):
        running.start()


def test_a_server_that_is_late_is_ended(servers, program, tmp_path):
    running = servers(
        program("import time; print('so slow', flush=True); time.sleep(600)"), start_timeout_s=1.0
    )
    with pytest.raises(WorkerError, match="vLLM server 0 does not answer after 1 s"):
        running.start()
    wait_for_end(tmp_path)


def test_a_command_that_cannot_be_run_is_named(servers, tmp_path):
    running = servers([str(tmp_path / "python")])
    with pytest.raises(WorkerError, match=r"^policy\.generation\.command: .*No such file"):
        running.start()


def test_a_guard_that_does_not_start_is_an_error(servers, program, tmp_path, monkeypatch):
    guard = tmp_path / "guard.py"
    guard.write_text("import time; time.sleep(600)")
    monkeypatch.setattr(vllm_guard, "__file__", str(guard))
    monkeypatch.setattr(vllm_servers, "_GUARD_S", 0.5)
    with pytest.raises(WorkerError, match="cannot be started: no answer"):
        servers(program(SERVER)).start()
    wait_for_end(tmp_path)


def test_a_closed_run_starts_no_server(servers, program, tmp_path):
    running = servers(program(SERVER))
    running.close()
    with pytest.raises(WorkerError, match="closed while they start"):
        running.start()
    assert processes_in(tmp_path) == []


@pytest.mark.parametrize(
    ("devices", "parts"),
    [
        ("0,1,2,3", ["0,1", "2,3"]),
        ("GPU-a,GPU-b", ["GPU-a", "GPU-b"]),
        ("0", [None, None]),  # shared
        ("", [None, None]),
    ],
)
def test_servers_share_the_workers_gpus(devices, parts):
    name = "CUDA_VISIBLE_DEVICES"
    variables = [devices_of(number, 2, {name: devices}).get(name) for number in range(2)]
    assert variables == parts


class OldVllm(http.server.BaseHTTPRequestHandler):
    """A server that answers like vLLM, without ``weight_versions``, as before 0.32."""

    def do_GET(self):
        self.answer({"data": [{"max_model_len": 16}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        token = {"token_id": 1, "logprob": -0.5, "top_logprobs": [{"logprob": -0.5}]}
        assert body["sampling_params"]["max_tokens"] == 1
        choice = {"token_ids": [1], "logprobs": {"content": [token]}, "finish_reason": "length"}
        self.answer({"choices": [choice]})

    def answer(self, content):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())


@pytest.fixture
def old_vllm():
    """Start an `OldVllm`; return its address."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), OldVllm) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_asynchronous_run_requires_weight_versions(old_vllm, tmp_path, asynchronous):
    servers = {"command": [], "count": 0, "environment": {}, "token_env": None}
    worker = VllmWorker(
        [old_vllm],
        servers={**servers, "folder": str(tmp_path), "start_timeout_s": TIMEOUT_S},
        generation={"pad_token_id": 0, "max_total_sequence_length": 16, "max_new_tokens": 4},
        asynchronous=asynchronous,
    )
    message = rf"'vllm': {old_vllm} reports no weight_versions.*vLLM 0\.32 or later"
    with pytest.raises(WorkerError, match=message) if asynchronous else nullcontext():
        worker.ready()
