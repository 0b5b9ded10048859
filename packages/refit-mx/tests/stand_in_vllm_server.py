"""A server as vLLM's, over real HTTP, around a tiny model and the modules of `stand_in_vllm`.

vLLM's routes for development, a scheduler with the three pause modes, one worker with its own
engine for each rank of the tensor parallelism. Routes under ``/stand_in`` are not vLLM's: a test
sets faults there and looks at the weights.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from urllib.parse import parse_qs, urlsplit

import torch
from stand_in_model import TinyConfig, TinyForCausalLM, checkpoint, digest_of, forward
from stand_in_vllm import provide, seeded_engine


class Scheduler:
    """Generates greedily, one token of every running request a step."""

    def __init__(self, ranks):
        self.ranks = ranks
        self.running, self.paused, self.admits, self.dead = [], False, True, None
        self.lock = threading.Condition()
        threading.Thread(target=self._loop, daemon=True).start()

    def generate(self, prompt, most):
        request = SimpleNamespace(tokens=list(prompt), seen=[], most=most, reason=None)
        with self.lock:
            self.lock.wait_for(lambda: self.admits)
            self.running.append(request)
            self.lock.notify_all()
            self.lock.wait_for(lambda: request.reason is not None or self.dead)
        if self.dead:
            raise EngineDeadError(self.dead)
        return {
            "tokens": request.tokens[len(prompt) :],
            "weights_seen": request.seen,
            "finish_reason": request.reason,
        }

    def pause(self, mode):
        with self.lock:
            self.admits = False
            if mode == "wait":
                self.lock.wait_for(lambda: not self.running)
            self.paused = True
            if mode == "abort":
                for request in self.running:
                    request.reason = "abort"
                self.running.clear()
            self.lock.notify_all()

    def resume(self):
        with self.lock:
            self.paused, self.admits = False, True
            self.lock.notify_all()

    def _loop(self):
        while True:
            with self.lock:
                self.lock.wait_for(lambda: self.running and not self.paused)
                for request in list(self.running):
                    request.seen.append([digest_of(rank) for rank in self.ranks])
                    try:
                        request.tokens.append(self._step(request.tokens))
                    except Exception as error:  # noqa: BLE001 - as vLLM, whose engine core ends
                        self.dead = f"{type(error).__name__}: {error}"
                        self.lock.notify_all()
                        return
                    if len(request.seen) >= request.most:
                        request.reason = "length"
                        self.running.remove(request)
                self.lock.notify_all()
            # A lock is not fair: without this a pause would wait for all requests.
            time.sleep(0.001)

    def _step(self, tokens):
        for rank in self.ranks:
            rank(tokens)
            rank.compute_logits(None)
        return int(forward(self.ranks, tokens).argmax())


class EngineDeadError(Exception):
    """The engine core has ended; every call fails from then on."""


class Worker:
    """One rank."""

    def __init__(self, arguments, rank, factory):
        self.model = TinyForCausalLM(arguments.config, arguments.tp, rank)
        self.model.load_weights(checkpoint(arguments.config, arguments.seed).items())
        config = SimpleNamespace(backend=arguments.backend)
        parallel = SimpleNamespace(tensor_parallel_size=arguments.tp, rank=rank)
        if arguments.generation == "new":
            vllm_config = SimpleNamespace(
                model_config=SimpleNamespace(model=arguments.model_name), parallel_config=parallel
            )
            self.engine = factory.create_engine(
                config, vllm_config, torch.device("cpu"), self.model
            )
        else:
            self.engine = factory.create_engine(config, parallel)

    def init_weight_transfer_engine(self, info):
        self.engine.init_transfer_engine(self.engine.parse_init_info(info))

    def start_weight_update(self):
        self.engine.start_weight_update()

    def update_weights(self, info):
        if hasattr(self.engine, "update_weights"):
            self.engine.update_weights(info)
        else:
            self.engine.receive_weights(
                self.engine.parse_update_info(info), load_weights=self.model.load_weights
            )

    def finish_weight_update(self):
        self.engine.finish_weight_update()

    def tear_next_install(self):
        """Let the next install fail when about half of the parameters are copied, once."""
        if hasattr(self.engine, "tear"):
            self.engine.tear = True
            return
        from refit_mx.engine import weight_transfer

        install, mine = weight_transfer.install_tensors, self.model.model.norm.weight

        def install_half(tensors, live):
            # The ranks of this server are threads: only this one's install is torn.
            if not any(each.data_ptr() == mine.data_ptr() for each in live.values()):
                return install(tensors, live)
            weight_transfer.install_tensors = install
            for name in list(tensors)[: len(tensors) // 2]:
                live[name].copy_(tensors[name])
            raise OSError("the install of a test fails half way")

        weight_transfer.install_tensors = install_half


class Application:
    def __init__(self, arguments):
        factory = provide(arguments.generation)
        if arguments.backend == "mx":
            from refit_mx.engine.registration import register

            register()
        else:
            factory.register_engine("seeded", seeded_engine())
        self.workers = [Worker(arguments, rank, factory) for rank in range(arguments.tp)]
        self.scheduler = Scheduler([worker.model for worker in self.workers])
        self.pool = ThreadPoolExecutor(arguments.tp)
        self.version, self.faults, self.pauses, self.busy = None, {}, [], 0
        self.routes = {
            ("POST", "/pause"): self.pause,
            ("POST", "/resume"): lambda q, b: self.scheduler.resume() or {"status": "resumed"},
            ("GET", "/is_paused"): lambda q, b: {"is_paused": self.scheduler.paused},
            ("GET", "/get_world_size"): lambda q, b: {"world_size": arguments.tp},
            ("POST", "/init_weight_transfer_engine"): self.init,
            ("POST", "/update_weights"): self.update,
            ("POST", "/update_weight_version"): self.name_version,
        }
        if arguments.generation == "new":
            self.routes["POST", "/start_weight_update"] = self.start
            self.routes["POST", "/finish_weight_update"] = self.finish
        if os.environ.get("VLLM_SERVER_DEV_MODE") != "1":
            self.routes.clear()
        self.routes["POST", "/v1/completions"] = lambda q, b: self.scheduler.generate(
            b["prompt"], b["max_tokens"]
        )
        self.routes["POST", "/stand_in/faults"] = self.set_faults
        self.routes["GET", "/stand_in/state"] = self.state

    def collective_rpc(self, method, *arguments):
        """On all workers at once; raises the first error when all have returned."""
        self.busy += 1
        calls = [self.pool.submit(getattr(w, method), *arguments) for w in self.workers]
        errors = [call.exception() for call in calls]
        self.busy -= 1
        for error in errors:
            if error is not None:
                raise error

    def pause(self, query, body):
        mode = query.get("mode", "abort")
        if mode not in ("abort", "wait", "keep"):
            raise BadRequestError(f"Invalid mode {mode!r}")
        self.scheduler.pause(mode)
        self.pauses.append([mode, query.get("clear_cache", "true")])
        return {"status": "paused"}

    def init(self, query, body):
        self.collective_rpc("init_weight_transfer_engine", needed(body, "init_info"))
        return {"message": "Weight transfer initialized"}

    def start(self, query, body):
        self.collective_rpc("start_weight_update")
        return {"message": "Weight update started"}

    def update(self, query, body):
        self.collective_rpc("update_weights", needed(body, "update_info"))
        return {"message": "Weights updated"}

    def finish(self, query, body):
        self.collective_rpc("finish_weight_update")
        return {"message": "Weight update finished"}

    def name_version(self, query, body):
        self.version = needed(body, "weight_version")
        return {"message": "Weight version updated"}

    def set_faults(self, query, body):
        self.faults.update(body)
        if body.get("tear"):
            self.workers[-1].tear_next_install()
        return {}

    def state(self, query, body):
        return {
            "pid": os.getpid(),
            "digests": [digest_of(worker.model) for worker in self.workers],
            "version": self.version,
            "is_paused": self.scheduler.paused,
            "dead": self.scheduler.dead,
            "pauses": self.pauses,
            "busy": self.busy,
            "running": len(self.scheduler.running),
        }


class BadRequestError(Exception):
    pass


def needed(body, key):
    if key not in body:
        raise BadRequestError(f"Missing '{key}' in request body")
    return body[key]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    application: Application

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        self.answer("GET")

    def do_POST(self):
        self.answer("POST")

    def answer(self, method):
        url = urlsplit(self.path)
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        query = {key: values[-1] for key, values in parse_qs(url.query).items()}
        route = self.application.routes.get((method, url.path))
        if route is None:
            if any(path == url.path for _, path in self.application.routes):
                return self.send(405, {"detail": "Method Not Allowed"})
            return self.send(404, {"detail": "Not Found"})
        fault = self.application.faults.pop(url.path, None)
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "stop":
            # To this thread: sent to the process another may take it, and this one would go on.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        if fault == "error":
            return self.send(500, {"detail": "the error of a test"})
        if fault == "redirect":
            self.send_response(307)
            self.send_header("Location", f"http://{self.headers['Host']}/resume")
            self.send_header("Content-Length", "0")
            return self.end_headers()
        if fault == "flood":
            return self.send(200, {"much": "x" * (4 << 20)})
        if fault == "trickle":
            return self.trickle()
        try:
            if (dead := self.application.scheduler.dead) and url.path != "/stand_in/state":
                raise EngineDeadError(dead)
            answer = route(query, json.loads(raw) if raw else {})
        except BadRequestError as error:
            return self.send(400, {"detail": str(error)})
        except Exception as error:  # noqa: BLE001 - as vLLM's server, which answers 500
            return self.send(500, {"detail": f"{type(error).__name__}: {error}"})
        if fault == "kill_after":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "not_json":
            return self.send(200, None, raw=b"<html>")
        return self.send(200, answer)

    def trickle(self):
        self.send_response(200)
        self.send_header("Content-Length", "1000000")
        self.end_headers()
        try:
            while True:
                self.wfile.write(b" ")
                self.wfile.flush()
                time.sleep(0.05)
        except OSError:
            self.close_connection = True

    def send(self, status, value, raw=None):
        data = json.dumps(value).encode() if raw is None else raw
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="seeded")
    parser.add_argument("--generation", default="new")
    parser.add_argument("--model-name", default="tiny")
    parser.add_argument("--config", type=lambda text: TinyConfig(**json.loads(text)), default="{}")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    Handler.application = Application(arguments)
    server = ThreadingHTTPServer(("127.0.0.1", arguments.port), Handler)
    server.daemon_threads = True
    sys.stdout.write(f"http://127.0.0.1:{server.server_address[1]}\n")
    sys.stdout.flush()
    server.serve_forever()


if __name__ == "__main__":
    main()
