"""Test processes are killed and waited for from several threads, as a transport's lanes do it."""

from __future__ import annotations

import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import forked_processes

THREADS = 4


def main() -> None:
    """The process: runs until its standard input ends."""
    sys.stdin.read()


def test_a_process_killed_by_several_threads_at_once_has_ended_for_all_of_them():
    with ThreadPoolExecutor(THREADS) as pool:
        for _ in range(50):
            process = forked_processes.start("test_forked_processes")
            together = Barrier(THREADS)

            def kill_and_wait(process=process, together=together) -> int:
                together.wait(30)
                process.kill()
                return process.wait(30)

            codes = [pool.submit(kill_and_wait) for _ in range(THREADS)]
            assert {code.result(60) for code in codes} == {-signal.SIGKILL}
            process.stdin.close()
            process.stdout.close()
