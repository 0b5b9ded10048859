"""Fixtures: pages of a service with a made-up run, in this process and in a real Chromium."""

import json
import shutil
import sys
import threading
import time
from pathlib import Path

import pytest
import uvicorn
from playwright.sync_api import sync_playwright
from waiting import until

# Tests are imported by path, so their shared modules need this folder.
sys.path.insert(0, str(Path(__file__).parent))

from alerting import rule, rules_in
from made_up_plane import MadeUpPlane
from made_up_traces import (
    FIELDS,
    HOSTILE,
    NOW_NS,
    RUN,
    STEPS,
    grpo_step,
    requests_of,
    sample_id,
    trace_id_of,
)

from dataplane_admin import Settings, create_app

TIMEOUT_S = 20.0
TIMEOUT_MS = 20_000
LOAD_MS = 60_000


class Site:
    """A service with a made-up data plane and a made-up run."""

    def __init__(self, folder):
        self.plane = MadeUpPlane()
        settings = Settings(
            store_url=f"sqlite:///{folder}/admin.sqlite",
            jaeger_url="http://jaeger.example:16686",
            keep_sample_text=True,
            allow_actions=True,
            poll_s=0.05,
            alerts=rules_in(folder, rule("logprob_gap", 0.1), rule("store_full", 0.99)),
            alerts_every_s=0.2,
        )
        self.app = create_app(settings, inspector=self.plane)
        self.service = self.app.state.service
        self.url = ""

    def change(self):
        """Change something that the pages show."""
        self.plane.tick += 1


def steps():
    """Yield spans and events of each step, oldest first."""
    for step in range(STEPS):
        slow, fails = (1.6 if step == STEPS - 1 else 1.0), step == STEPS - 4
        yield grpo_step(step, slow_train=slow, hostile=step == STEPS - 2, fails=fails)


def send_run(job, otlp):
    """Send forty steps; the last one is unfinished and its trainer is blocked."""

    def log(name, ids=(), *, ago_s=0.0, run=RUN, **facts):
        at_s = (NOW_NS - otlp.start_ns) / 1e9 - ago_s
        job.send(otlp.log(name, ids, at_s=at_s, run=run, service="grpo.policy", **facts))

    waiting = {"wait": "w", "task": "train", "fields": ["input_ids", "advantages"], "samples": 128}
    with pytest.MonkeyPatch.context() as then:
        then.setattr(time, "time_ns", lambda: NOW_NS - 3_600 * 10**9)
        since_ns = NOW_NS - 7_200 * 10**9
        log(
            "waiting", ago_s=3_600, run="yesterday", since_ns=since_ns, report_every_s=30, **waiting
        )
    for number in range(15):
        job.send(otlp.trace(run=HOSTILE, step=None, names=["grpo.validation"], start_s=number))
    for step, records in enumerate(steps()):
        traces, logs = requests_of(records)
        spans = [resource.scope_spans[0].spans[0] for resource in traces.resource_spans]
        if step == STEPS - 3:
            # Drop the root and the spans of a worker, and have others rejected.
            for resource, span in zip(list(traces.resource_spans), spans, strict=True):
                if not span.parent_span_id or span.name == "compute_logprobs":
                    traces.resource_spans.remove(resource)
            for _ in range(7):
                traces.resource_spans[0].scope_spans[0].spans.add(trace_id=spans[0].trace_id)
        if step == STEPS - 1:
            spans[0].links.add(trace_id=bytes.fromhex(trace_id_of(0)), span_id=b"linked to")
            ago_s = (NOW_NS - spans[0].start_time_unix_nano) / 1e9
            log("cleared", ago_s=ago_s)
            log("registered", ago_s=ago_s, samples=512, tasks=["train"], fields=FIELDS)
            rollouts = {f"rollout actor {number}": f"node-2:401{number}" for number in range(4)}
            for name, owner in rollouts.items():
                log("generator_joined", ago_s=ago_s - 0.1, generator=name, owner=owner)
            lost = {"generator": "rollout actor 2", "owner": rollouts["rollout actor 2"]}
            log("generator_left", ago_s=ago_s - 0.2, reason="out of memory ", **lost)
        if step == STEPS - 2:
            root = next(span for span in spans if not span.parent_span_id)
            record = otlp.log("x", trace_id=root.trace_id, span_id=root.span_id)
            [item] = record.resource_logs[0].scope_logs[0].log_records
            item.event_name, item.body.string_value = "", HOSTILE
            item.severity_text = HOSTILE[:9]
            job.send(record)
        job.send(traces, logs)
    # Samples that the first and the last step trained on, put with or without a version.
    for step, ids, versions in (
        (0, "abcd", (0, 0, 0, 2)),
        (0, "uvwx", ()),
        (STEPS - 1, "ABCDEFGH", ()),
    ):
        facts = {"partition": "stale", "trace_id": bytes.fromhex(trace_id_of(step)), "step": step}
        log("put", list(ids), ago_s=9, **facts, **({"version": 0} if versions else {}))
        for place, name in enumerate(ids):
            version = versions[place] if versions else step
            log("trained", [name], ago_s=8, task="train", version=version, **facts)
    ids = [sample_id(STEPS - 1, place) for place in range(480)]
    log("put", ids, fields=FIELDS[:4])
    log(
        "put", [name for place, name in enumerate(ids) if place not in (0, 3, 4)], fields=FIELDS[4:]
    )
    log("waiting", ago_s=0, since_ns=NOW_NS - 71 * 10**9, **waiting)


def send_samples(job, otlp):
    """Send facts of a group, and the text and tokens of its first sample."""
    ids = [f"{HOSTILE}_g{number}" for number in range(8)]
    columns = {
        "group": [HOSTILE] * 8,
        "reward": [number / 7 for number in range(8)],
        "advantage": [number / 7 - 0.5 for number in range(8)],
        "length": [100 + number for number in range(8)],
        "truncated": [number == 7 for number in range(8)],
        "first_version": [3] * 8,
        "last_version": [3 + number % 2 for number in range(8)],
        "state": ["generated"] * 8,
    }
    drawn = range(200)
    tokens = {
        "text": [f"{HOSTILE}\n" if place == 7 else f"w{place} " for place in drawn],
        "generator": [None if place < 20 else -0.02 * (place % 200) for place in drawn],
        "trainer": [-0.02 * (place % 200) - (place == 90) for place in drawn],
        "mask": [place >= 20 for place in drawn],
        "version": [None if place < 20 else 3 + place // 100 for place in drawn],
    }
    turns = [{"role": "user", "content": HOSTILE}, {"role": HOSTILE, "content": "w " * 200}]
    for name, body in (
        ("rl.sample.facts", {"ids": ids, **columns}),
        ("rl.sample.text", {"id": ids[0], "turns": turns, "tokens": tokens}),
    ):
        request = otlp.log("", run=HOSTILE, body=json.dumps(body), step=7)
        request.resource_logs[0].scope_logs[0].log_records[0].event_name = name
        job.send(request)


# Module scope: playwright runs an event loop in the test thread while it lives.
@pytest.fixture(scope="module")
def job(tmp_path_factory, job_class, otlp):
    site = Site(tmp_path_factory.mktemp("site"))
    with job_class(site.app) as job:
        job.site = site
        send_run(job, otlp)
        send_samples(job, otlp)
        name = "replay-100k"
        until(lambda: job.get("status")["live"]["attached"])
        until(lambda: job.get("partition/matrix", id=name)["scanned"] == 100_000)
        yield job


@pytest.fixture(scope="module")
def site(job):
    return job.site


@pytest.fixture(scope="module")
def client(job):
    return job.client


@pytest.fixture(scope="module")
def bare_client(tmp_path_factory, job_class):
    """Return a client of a service without data."""
    url = f"sqlite:///{tmp_path_factory.mktemp('bare')}/admin.sqlite"
    with job_class(create_app(Settings(store_url=url))) as job:
        yield job.client


@pytest.fixture(scope="module")
def served(site):
    server = uvicorn.Server(
        uvicorn.Config(site.app, port=0, log_level="warning", lifespan="off", ws="none")
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    site.url = f"http://127.0.0.1:{port}"
    yield site
    site.app.state.updates.end()
    server.should_exit = True
    thread.join(TIMEOUT_S)


@pytest.fixture(scope="module")
def browser():
    path = shutil.which("chromium")
    if path is None:
        pytest.fail("no chromium; `apt-get install chromium`, as .ci/run does")
    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    flags += ["--disable-component-update", "--disable-sync"]
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=flags)
        yield started
        started.close()


class Watched:
    """A page and its errors and warnings."""

    def __init__(self, browser, site, **options):
        self.site = site
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}} | options)
        self.context.set_default_timeout(TIMEOUT_MS)
        # Records violations of the policy that log nothing.
        self.context.add_init_script(
            "window.violations = []; document.addEventListener('securitypolicyviolation', "
            "(event) => window.violations.push(event.violatedDirective));"
        )
        self.page = self.context.new_page()
        self.complaints = []
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", self._on_dialog)

    def go(self, path):
        self.page.goto(self.site.url + path, timeout=LOAD_MS)
        return self.page

    def check(self):
        assert self.complaints == []
        assert self.page.evaluate("window.violations") == []

    def _on_console(self, message):
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def _on_dialog(self, dialog):
        self.complaints.append(f"dialog {dialog.message}")
        dialog.dismiss()


@pytest.fixture
def watched(browser, served):
    opened = []

    def open_page(**options):
        opened.append(Watched(browser, served, **options))
        return opened[-1]

    yield open_page
    for watch in opened:
        watch.check()
        watch.context.close()
