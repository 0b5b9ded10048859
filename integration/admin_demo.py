"""The admin service and a live demo run: ``make admin``.

The run trains the demo's tiny model for a million steps and reports to the service, which also
inspects the data plane of the run's Ray cluster. All files are below ``runs/admin``; Ctrl-C ends
both.
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
from typing import IO, TypeAlias

FOLDER, LOG = Path("runs") / "admin", "run.log"
SCRIPTS = Path(sysconfig.get_path("scripts"))
TIMEOUT_S = 60.0
# Export every half second, so that the pages follow the run; the default is five seconds.
EXPORT_DELAYS = {"OTEL_BSP_SCHEDULE_DELAY": "500", "OTEL_BLRP_SCHEDULE_DELAY": "500"}


def main(steps: int = 1_000_000) -> int:
    """Run service and demo until both exit, or until Ctrl-C; return the exit status."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    print("starting the admin service", flush=True)
    changes = (
        "checkpointing.every_steps=0",
        "validation.every_steps=0",
        f"grpo.num_steps={steps}",
        "tracing.sample_texts=16",
    )
    options = ("--allow-actions", "--keep-sample-text", *sys.argv[1:])
    with served_run(FOLDER, changes, options) as started:
        if started is None:
            print(f"the service did not start; see {FOLDER / LOG}")
            return 1
        url, service, run = started
        print(f"\n  {url}\n")
        print(
            f"It shows a demo run, whose log is {FOLDER / LOG}. Ctrl-C ends both.",
            flush=True,
        )
        with contextlib.suppress(KeyboardInterrupt):
            run.wait()
            print(f"the run ended with status {run.returncode}; Ctrl-C ends the service")
            service.wait()
    return 0


Process: TypeAlias = "subprocess.Popen[bytes]"


@contextlib.contextmanager
def served_run(
    folder: Path, changes: Sequence[str], options: Sequence[str] = ()
) -> Iterator[tuple[str, Process, Process] | None]:
    """Run the admin service, and a demo run that it shows, during the block.

    Args:
        folder: folder for all files.
        changes: changes of the demo's configuration, as ``key=value``.
        options: options of ``dataplane-admin serve``.

    Yields:
        URL of the service, its process, and that of the run; None if the service does not start.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((folder / LOG).open("ab"))
        serve = [
            str(SCRIPTS / "dataplane-admin"),
            "serve",
            "--db",
            str(folder / "admin.sqlite"),
            "--ray-address",
            "auto",
            *options,
        ]
        service = stack.enter_context(_running(serve, {}, stdout=subprocess.PIPE, stderr=log))
        assert service.stdout is not None
        url = service.stdout.readline().decode().strip()
        if not url:
            yield None
            return
        train = [
            str(SCRIPTS / "grpo-trainer"),
            "train",
            *_settings(
                f"run.output={folder}",
                "tracing.enabled=true",
                f"tracing.endpoint={url}",
                *changes,
            ),
        ]
        run = stack.enter_context(_running(train, EXPORT_DELAYS, stdout=log, stderr=log))
        yield url, service, run


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
    """Run a process during the block; then terminate it, or kill it after `TIMEOUT_S`."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        env={**os.environ, **environment},
        start_new_session=True,  # Ctrl-C reaches only this script, which ends them in order
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


if __name__ == "__main__":
    sys.exit(main())
