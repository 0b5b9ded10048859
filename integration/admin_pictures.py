"""Pictures of a blocked run for the docs: ``python -m integration.admin_pictures``.

An admin service inspects an in-memory data plane of this process, in which one step has reached the
training stage: 32 of 128 samples lack advantages, so the task ``train`` is blocked. Chromium takes
``admin-partition.png`` and ``admin-blocked.png`` for ``docs/images``.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import tempfile
import threading
from pathlib import Path

import torch
from playwright.sync_api import Browser, sync_playwright
from tensordict import TensorDict

from dataplane_admin import Settings, create_app, serve
from dataplane_core import DataPlaneClient, build_data_plane_client
from observability import setup, step_context

FOLDER = Path("docs") / "images"
WIDTH, HEIGHT, MARGIN = 1280, 800, 10
TIMEOUT_S = 300
STEP, ROWS, GROUP, TOKENS = 41, 128, 16, 64
READY = 96
"""Samples with advantages."""
FIELDS = {
    "input_ids": (TOKENS,),
    "input_lengths": (),
    "generation_logprobs": (TOKENS,),
    "token_mask": (TOKENS,),
    "sample_mask": (),
    "prev_logprobs": (TOKENS,),
    "reference_policy_logprobs": (TOKENS,),
    "advantages": (),
}
_PARTITION = "train"
_STAGES = {"prev_lp": "prev_logprobs", "ref_lp": "reference_policy_logprobs"}


def put(client: DataPlaneClient, ids: list[str], *fields: str) -> None:
    """Put fields of samples."""
    columns = {name: torch.zeros(len(ids), *FIELDS[name]) for name in fields}
    client.put_samples(ids, _PARTITION, TensorDict(columns, [len(ids)]))


def run_step(client: DataPlaneClient) -> None:
    """Run a step up to the claim of the training stage, which stays blocked."""
    ids = [f"p{24 + row // GROUP}_g{row % GROUP}" for row in range(ROWS)]
    written = [name for name in FIELDS if name not in {*_STAGES.values(), "advantages"}]
    client.register_partition(
        _PARTITION, list(FIELDS), ROWS, [*_STAGES, "train"], grpo_group_size=GROUP
    )
    put(client, ids, *written)
    for task, field in _STAGES.items():
        meta = client.claim_meta(_PARTITION, task, ["input_ids"], ROWS)
        put(client, ids, field)
        # The last group of the reference log-probabilities is still leased.
        client.acknowledge(meta.slice(0, ROWS - GROUP if task == "ref_lp" else ROWS))
    put(client, ids[ROWS - READY :], "advantages")
    client.claim_meta(_PARTITION, "train", ["input_ids", "advantages"], ROWS, timeout_s=TIMEOUT_S)


def take(browser: Browser, url: str) -> None:
    """Take both pictures."""
    page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
    page.set_default_timeout(TIMEOUT_S * 1000)
    page.goto(url)
    since = re.compile(r"^(1[5-9]|[2-9]\d) s")  # clearly blocked
    page.locator(".waits .since").filter(has_text=since).first.wait_for()
    heading = page.locator("#waits h2").bounding_box()
    tasks = page.locator("#waits .waits").first.bounding_box()
    assert heading is not None
    assert tasks is not None
    top, bottom = heading["y"] - MARGIN, tasks["y"] + tasks["height"] + MARGIN
    clip = {"x": 0, "y": top, "width": WIDTH, "height": bottom - top}
    page.screenshot(path=FOLDER / "admin-blocked.png", clip=clip)
    page.goto(f"{url}/partition?id={_PARTITION}")
    page.locator(".heat-cells svg path").first.wait_for(state="attached")
    page.screenshot(path=FOLDER / "admin-partition.png")


def take_while_blocked(client: DataPlaneClient, url: str) -> None:
    """Run the step, take the pictures, and end the process."""
    failed = True
    try:
        with setup("grpo.policy", run_id="demo", endpoint=url, export_interval_s=1.0):

            def step() -> None:
                with step_context("demo", STEP, weight_version=STEP):
                    run_step(client)

            # A daemon: the claim stays blocked, and the process must end.
            running = threading.Thread(target=step, daemon=True)
            running.start()
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(
                    executable_path=shutil.which("chromium"), args=["--no-sandbox"]
                )
                take(browser, url)
                browser.close()
            assert running.is_alive(), "the claim should still be blocked"
            failed = False
    finally:
        sys.stdout.flush()
        if failed:
            sys.excepthook(*sys.exc_info())
        os.kill(os.getpid(), signal.SIGKILL if failed else signal.SIGTERM)


def main() -> None:
    client = build_data_plane_client(
        {
            "enabled": True,
            "impl": "in_memory",
            "claim_lease_s": 600.0,
            "observability": {"enabled": True},
        }
    )

    def start(url: str) -> None:
        threading.Thread(target=take_while_blocked, args=[client, url], daemon=True).start()

    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(store_url=f"sqlite:///{folder}/admin.sqlite", poll_s=0.2)
        app = create_app(settings, inspector=client.inspector)
        serve(app, port=0, shutdown_timeout_s=2, announce=start)


if __name__ == "__main__":
    main()
