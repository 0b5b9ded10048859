"""Test program: the service with a data plane and a traced run.

It prints the URL, then serves until killed. Two steps are trained; in the third, three samples lack
a column and the trainer is blocked. Its argument is a JSON object, the arguments of `Settings`.
"""

import json
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import structlog
import torch
from tensordict import TensorDict

from dataplane_admin import Settings, create_app, serve
from dataplane_core import build_data_plane_client
from observability import emit, inject, record_trained, setup, span, step_context, traced

PLANE = {
    "enabled": True,
    "impl": "in_memory",
    "claim_lease_s": 600.0,
    "observability": {"enabled": True},
}
FIELDS = ["input_ids", "advantages"]
SIZE = 8


class Worker:
    def __init__(self, client):
        self.client = client

    @traced
    def generate(self, ids):
        with span("sample_tokens", "productive"):
            tokens = torch.randint(100, (len(ids), 8))
        tags = [{"group": f"g{place // 4}", "reward": place} for place in range(len(ids))]
        self.client.put_samples(ids, "train", TensorDict({"input_ids": tokens}, [len(ids)]), tags)

    @traced
    def advantages(self, ids):
        values = TensorDict({"advantages": torch.zeros(len(ids))}, [len(ids)])
        self.client.put_samples(ids, "train", values)

    @traced
    def train(self, size):
        meta = self.client.claim_meta("train", "train", FIELDS, size, timeout_s=600)
        batch = self.client.get_data(meta)
        with span("optimizer_step", "productive"):
            batch["input_ids"].float().mean()
        record_trained(self.client, meta, field="input_ids")
        self.client.acknowledge(meta)


def steps(client, worker, pool):
    for step in range(3):
        ids = [f"step{step}_p{place // 4}_g{place}" for place in range(SIZE)]
        with step_context("tests", step, weight_version=step), span("grpo.step"):
            client.register_partition("train", FIELDS, SIZE, ["train"])
            with span("rollout", "idle"):
                pool.submit(worker.generate, ids, carrier=inject()).result()
            last = step == 2
            worker.advantages(ids[: SIZE - 3] if last else ids, carrier=inject())
            with span("train", "idle"):
                waiting = pool.submit(worker.train, SIZE, carrier=inject())
                if last:
                    return
                waiting.result()
            with span("drop", "wasted"):
                emit("dropped", "train", ids[:1], reason="surplus")
            client.clear_samples(ids, "train")


def main(text):
    given = json.loads(text)
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    if token := given.get("token"):
        os.environ["OTEL_EXPORTER_OTLP_HEADERS"] = f"authorization=Bearer%20{token}"
    client = build_data_plane_client(PLANE)
    app = create_app(
        Settings(poll_s=0.05, jaeger_url="http://jaeger.example:16686", **given),
        inspector=client.inspector,
    )

    def feed(url):
        with setup("grpo.driver", run_id="tests", endpoint=url) as telemetry:
            steps(client, Worker(client), ThreadPoolExecutor(2))
            telemetry.flush()
            sys.stdout.write(f"{url}\n")
            sys.stdout.flush()
            threading.Event().wait()

    def start_feed(url):
        threading.Thread(target=feed, args=[url], daemon=True).start()

    serve(app, port=0, shutdown_timeout_s=2, announce=start_feed)


if __name__ == "__main__":
    main(*sys.argv[1:])
