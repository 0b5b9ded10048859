"""Failed starts and joins of a local Ray."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest
import ray
from queue_setup import local_ray
from ray._private import services

from dataplane_core import UnavailableError
from dataplane_tq import join_ray, start_local_ray


def test_failed_start_is_one_error_and_leaves_no_process(unforked_workers, monkeypatch):
    def never_registered(*_):
        raise Exception("The current node timed out during startup.")  # as Ray does

    before = set(psutil.Process().children(recursive=True))
    monkeypatch.setattr(services, "RAYLET_EXECUTABLE", "/bin/false")
    monkeypatch.setattr(services, "get_node", never_registered)
    with (
        pytest.raises(UnavailableError, match=r"timed out during startup;.* logs are in") as error,
        local_ray(),
    ):
        pass
    assert "raylet ended with status 1" in str(error.value)
    assert error.value.__suppress_context__
    left = set(psutil.Process().children(recursive=True)) - before
    assert not psutil.wait_procs(left, timeout=10)[1]
    assert not ray.is_initialized()


def test_wrong_option_of_a_start_is_refused_as_ray_does():
    with pytest.raises(ValueError, match="-1"):
        start_local_ray(num_cpus=-1)
    with pytest.raises(UnavailableError, match=r"Unknown keyword argument\(s\): num_cpu$"):
        start_local_ray(num_cpu=1)


def test_join_without_a_cluster_is_one_error(monkeypatch, tmp_path):
    monkeypatch.setattr(services, "find_gcs_addresses", set)
    with pytest.raises(UnavailableError, match=r"'auto' cannot be joined: Could not find") as error:
        join_ray("auto", _temp_dir=str(tmp_path))
    assert error.value.__suppress_context__


def test_second_start_is_one_error_and_harms_nothing(cluster):
    with pytest.raises(UnavailableError, match=r"did not start.*called ray.init twice"):
        start_local_ray(num_cpus=1)
    assert ray.get(ray.put(1)) == 1


def test_join_of_another_version_is_one_error(cluster):
    code = """
import sys
import ray
from dataplane_core import UnavailableError
from dataplane_tq import join_ray
ray.__version__ = "0.1"
try:
    join_ray(sys.argv[1], logging_level="ERROR")
except UnavailableError as error:
    assert error.__suppress_context__
    print(error)
"""
    address = ray.get_runtime_context().gcs_address
    joined = [sys.executable, "-c", code, address]
    done = subprocess.run(joined, capture_output=True, text=True, check=True, timeout=120)
    assert "cannot be joined: Version mismatch" in done.stdout
