"""Starts stand-in servers in processes of their own, and ends them by their id whatever happens."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil

PROGRAM = Path(__file__).parent / "stand_in_vllm_server.py"
PATIENCE_S = 90.0


class StandIn:
    """One server; the same port again after a restart."""

    def __init__(self, *arguments, dev_mode=True):
        self.arguments = arguments
        self.environment = {
            **os.environ,
            "VLLM_SERVER_DEV_MODE": "1" if dev_mode else "0",
            "OMP_NUM_THREADS": "1",
        }
        self.url = None
        self.start()

    def start(self):
        port = ("--port", self.url.rpartition(":")[2]) if self.url else ()
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), *self.arguments, *port],
            stdout=subprocess.PIPE,
            text=True,
            env=self.environment,
        )

    def ready(self):
        """Wait until it listens."""
        readable, _, _ = select.select([self.process.stdout], [], [], PATIENCE_S)
        assert readable, f"no line within {PATIENCE_S:g} s"
        self.url = self.process.stdout.readline().strip()
        assert self.url, f"ended with {self.process.wait(PATIENCE_S)}"
        return self

    def kill(self):
        self.process.kill()
        self.process.wait(PATIENCE_S)
        self.process.stdout.close()

    def restart(self):
        self.kill()
        self.start()
        self.ready()

    def revive(self):
        """Bring it back from whatever a test did to it."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            try:
                _ = self.state
            except httpx.TransportError:
                # It was killed, which takes a moment.
                self.process.wait(PATIENCE_S)
            else:
                return
        self.restart()

    def get(self, path):
        answer = httpx.get(self.url + path, timeout=PATIENCE_S, trust_env=False)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def post(self, path, body=None):
        answer = httpx.post(self.url + path, json=body, timeout=PATIENCE_S, trust_env=False)
        assert answer.status_code == 200, answer.text
        return answer.json()

    @property
    def state(self):
        return self.get("/stand_in/state")

    def fault(self, **faults):
        """At a route: ``update_weights="kill"``; once. ``tear=True``: the next install fails."""
        self.post(
            "/stand_in/faults",
            {route if route == "tear" else f"/{route}": kind for route, kind in faults.items()},
        )

    def wait_until_stopped(self):
        """Until a SIGSTOP has taken effect."""
        until = time.monotonic() + PATIENCE_S
        process = psutil.Process(self.process.pid)
        while process.status() != psutil.STATUS_STOPPED:
            assert time.monotonic() < until, process.status()
            time.sleep(0.01)

    def wait_for(self, what, condition):
        """Until the state is as wanted."""
        until = time.monotonic() + PATIENCE_S
        while not condition(state := self.state):
            assert time.monotonic() < until, f"{what}: {json.dumps(state)}"
            time.sleep(0.01)
        return state
