"""What tests have the workers of a loader do; a worker imports it by name."""

import threading

from dataplane_core import DataPlaneError
from dataplane_core.streaming import StreamingDataset


def unpicklable(batch, meta):
    return lambda: None


def stuck(batch, meta):
    threading.Event().wait()


def summed(batch, meta):
    return batch["x"].sum(), meta.sample_ids


class Local(DataPlaneError):
    """An error that cannot be pickled."""

    def __reduce__(self):
        raise TypeError("not for pickling")


class Failing(StreamingDataset):
    def batches(self, client, claimed, **options):
        raise Local("the store's own reason")
        yield
