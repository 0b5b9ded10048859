"""Errors of a connection to a Ray cluster.

Imports internals: the length of an error of Ray has no bound.
"""

import platform

import pytest
import ray
from ray._private.utils import check_version_info
from waiting import until

from dataplane_admin.live.connect import one_line
from dataplane_core import UnavailableError


def live(job):
    return job.get("status")["live"]


@pytest.mark.parametrize("address", ["127.0.0.1:1", "no-such-host.invalid:6379"])
def test_a_missing_ray_cluster_is_one_sentence(job_of, address):
    job = job_of(ray_address=address, query_timeout_s=1.0)
    error = until(lambda: "no Ray" in (live(job)["error"] or "") and live(job)["error"])
    assert error.startswith(f"Ray at {address}: no Ray cluster at '{address}': ")
    assert "\n" not in error


@pytest.fixture
def error_of(job_of, monkeypatch):
    """Return a function that joins a cluster with this Python version and returns the error."""

    def error_of(python):
        def join(address, *, timeout_s):
            # As the reader's process, which has this process's environment.
            versions = {"ray_version": ray.__version__, "python_version": python}
            try:
                check_version_info(versions, "this process")
            except RuntimeError as error:
                raise UnavailableError(f"no Ray cluster at {address!r}: {error}") from None
            raise UnavailableError(f"{address!r}: joined")

        monkeypatch.setattr("dataplane_tq.QueueInspector", join)
        job = job_of(ray_address="ray://cluster:10001")
        # Importing Ray takes seconds, in which the error is "not connected yet".
        return until(lambda: "'ray://" in (error := live(job)["error"]) and error)

    return error_of


def test_a_cluster_of_another_python_says_what_to_do(error_of):
    error = error_of("3.9.1")
    assert (
        "run the admin service with the Ray version and the Python 3.x of the cluster at" in error
    )
    assert "Python: 3.9.1" in error
    assert f"Python: {platform.python_version()}" in error
    assert "\n" not in error


def test_a_cluster_of_another_patch_release_is_joined(error_of):
    minor, _, patch = platform.python_version().rpartition(".")
    assert error_of(f"{minor}.{int(patch) + 1}").endswith(": joined")


def test_an_error_of_ray_has_a_bounded_length():
    assert len(one_line(RuntimeError("x" * 10_000))) < 1_000
