"""A worker process with a heartbeat: it registers, prints "live", and waits."""

import os
import signal
import sys
import time

from refit_mx import ControlClient
from refit_mx.control import Heartbeat, WorkerRole


def say(word):
    # Not through `sys.stdout`: a signal handler that interrupts a write to it must not write.
    os.write(1, f"{word}\n".encode())


def main(address, end):
    if end == "handler":
        # The heartbeat's handler must call this one.
        def stop(number, frame):
            say("handled")
            raise SystemExit(7)

        signal.signal(signal.SIGTERM, stop)
    client = ControlClient(address)
    heartbeat = Heartbeat(client, "w", WorkerRole.TRAINER, "m", ttl_s=60)
    say("live")
    if end == "exit":
        sys.stdin.readline()
        return
    if end == "busy":
        # Calls run all the time, so the handler interrupts one.
        while True:
            client.register_worker("x", WorkerRole.TRAINER, "m", ttl_s=60)
    if end == "closed":
        heartbeat.close()
        say("closed")
    while True:
        # Short sleeps: a signal that arrives as a sleep begins is handled only when it ends.
        time.sleep(0.1)


if __name__ == "__main__":
    main(*sys.argv[1:])
