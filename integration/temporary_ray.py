"""A Ray on this machine only, for tests and benchmarks."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any  # Any: options of Ray

import ray

from dataplane_tq import start_local_ray


@contextmanager
def temporary_ray(**options: Any) -> Iterator[None]:
    """Run a Ray without output during the block, with its files in a temporary folder.

    ``options`` are further ones of `start_local_ray`, such as ``num_cpus`` and ``namespace``.
    """
    # A short path: Ray's sockets are below it.
    with tempfile.TemporaryDirectory(prefix="tr-", ignore_cleanup_errors=True) as folder:
        try:
            start_local_ray(
                include_dashboard=False,
                _temp_dir=folder,
                logging_level="ERROR",
                log_to_driver=False,
                **options,
            )
            yield
        finally:
            ray.shutdown()
