"""A worker with a heartbeat, as a process of its own: it registers, says so, and waits."""

import signal
import sys
import time

from refit_mx.control import ControlClient, Heartbeat, WorkerRole


def say(word):
    sys.stdout.write(word + "\n")
    sys.stdout.flush()


def main(address, end):
    if end == "handler":
        # The program's own handler, which the heartbeat's must call.
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
        # Calls from the main thread all the time: the handler runs in the middle of one.
        while True:
            client.register_worker("x", WorkerRole.TRAINER, "m", ttl_s=60)
    if end == "closed":
        heartbeat.close()
        say("closed")
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    main(*sys.argv[1:])
