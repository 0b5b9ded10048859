"""Functions that loader workers run in tests; a worker imports them by name."""

import os
import signal
import threading

from dataplane_core import DataPlaneError, StreamingDataset


def unpicklable(batch, meta):
    return lambda: None


def stuck(batch, meta):
    threading.Event().wait()


def summed(batch, meta):
    return batch["x"].sum(), meta.sample_ids


class Local(DataPlaneError):
    """Error that cannot be pickled."""

    def __reduce__(self):
        raise TypeError("not for pickling")


class KilledInReport(StreamingDataset):
    def batches(self, client, claimed, **options):
        claimed.__self__._wlock.acquire()  # as the put of a report does
        os.kill(os.getpid(), signal.SIGKILL)
        yield


class Failing(StreamingDataset):
    def batches(self, client, claimed, **options):
        raise Local("the store's own reason")
        yield
