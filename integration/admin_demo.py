"""The admin service beside a live demo run: ``make admin``.

The run trains the demo's tiny model over and over and reports to the service, which also looks into
the data plane of its Ray cluster. Everything is kept below ``runs/admin``; both end with Ctrl-C.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

FOLDER = Path("runs") / "admin"
SCRIPTS = Path(sysconfig.get_path("scripts"))
PATIENCE_S = 60.0
# One looks at it while it goes on; a job leaves these at their five seconds.
SOON = {"OTEL_BSP_SCHEDULE_DELAY": "500", "OTEL_BLRP_SCHEDULE_DELAY": "500"}


def main(steps: int = 1_000_000) -> int:
    """Run both until one ends or Ctrl-C; the exit status."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    FOLDER.mkdir(parents=True, exist_ok=True)
    print("starting the admin service", flush=True)
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((FOLDER / "run.log").open("ab"))
        serve = [
            str(SCRIPTS / "dataplane-admin"),
            "serve",
            "--db",
            str(FOLDER / "admin.sqlite"),
            "--ray-address",
            "auto",
            "--allow-actions",
            *sys.argv[1:],
        ]
        service = stack.enter_context(_running(serve, {}, stdout=subprocess.PIPE, stderr=log))
        assert service.stdout is not None
        url = service.stdout.readline().decode().strip()
        if not url:
            print(f"the service did not start; {FOLDER / 'run.log'} says why")
            return 1
        train = [
            str(SCRIPTS / "grpo-trainer"),
            "train",
            *_settings(
                f"grpo.num_steps={steps}",
                f"run.output={FOLDER}",
                "checkpointing.every_steps=0",
                "validation.every_steps=0",
                "tracing.enabled=true",
                f"tracing.endpoint={url}",
            ),
        ]
        run = stack.enter_context(_running(train, SOON, stdout=log, stderr=log))
        print(f"\n  {url}\n")
        print(
            f"A demo run feeds it; its log is {FOLDER / 'run.log'}. Ctrl-C ends both.", flush=True
        )
        with contextlib.suppress(KeyboardInterrupt):
            run.wait()
            print(f"the run ended with status {run.returncode}; the service goes on until Ctrl-C")
            service.wait()
    return 0


def _settings(*assignments: str) -> list[str]:
    return [word for assignment in assignments for word in ("--set", assignment)]


@contextlib.contextmanager
def _running(
    command: Sequence[str],
    environment: dict[str, str],
    *,
    stdout: int | IO[bytes],
    stderr: IO[bytes],
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends with the block: asked first, killed if it does not listen."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        env={**os.environ, **environment},
        start_new_session=True,  # Ctrl-C reaches this script alone, which ends them in order
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


if __name__ == "__main__":
    sys.exit(main())
