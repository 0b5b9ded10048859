"""Several threads may decode a process's first manifests at once."""

from __future__ import annotations

import subprocess
import sys

THREADS = """
import sys, threading
import msgspec
from refit_mx.manifest.format import Manifest, NixlAgent, Registry, ShardColumns

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
    found.append(Manifest.decode(data))

threads = [threading.Thread(target=work) for _ in range(16)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert found == [made] * 16
"""


def test_sixteen_threads_decode_the_first_manifest_at_once():
    for _ in range(12):
        subprocess.run([sys.executable, "-c", THREADS], check=True, capture_output=True, timeout=60)
