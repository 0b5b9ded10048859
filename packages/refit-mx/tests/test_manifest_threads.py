"""Manifests are decoded in several threads at once, the first of a process too."""

from __future__ import annotations

import subprocess
import sys

THREADS = """
import sys, threading
import msgspec
from refit_mx.manifest import Manifest, NixlAgent, Registry, ShardColumns

sys.setswitchinterval(1e-6)
shards = ShardColumns(1, b"", b"", b"", b"")
nixl = NixlAgent("n", b"m", "DRAM", 0)
registry = Registry("hf_raw", {"block": 128})
made = Manifest("m", "v", "s", "w", "i", "e:1", registry, 0, 1, nixl, b"", b"", shards, b"")
data = msgspec.msgpack.encode(made)
together = threading.Barrier(16)
found = []

def work():
    together.wait()
    found.append(DECODE)

threads = [threading.Thread(target=work) for _ in range(16)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert found == [made] * 16
"""


def crashes(decode: str, tries: int) -> int:
    program = THREADS.replace("DECODE", decode)
    codes = [
        subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60).returncode
        for _ in range(tries)
    ]
    assert all(code in (0, -11) for code in codes)
    return sum(code == -11 for code in codes)


def test_sixteen_threads_may_be_the_first_to_decode_a_manifest():
    assert crashes("Manifest.decode(data)", 12) == 0
