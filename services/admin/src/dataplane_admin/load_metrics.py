"""Metrics that show the load of engines and nodes, and the exported metrics they are read from.

Names are those of vLLM, SGLang, NVIDIA's DCGM exporter, and OpenTelemetry's conventions for systems
and GPUs, which the collector's ``hostmetrics`` receiver follows. A metric has a value. A ratio also
has a total: for ``cpu``, the value is the busy seconds and the total is all seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["engine", "node"]


@dataclass(frozen=True)
class LoadMetric:
    """A metric of load; ``label`` is its name on a page."""

    name: str
    kind: Kind
    label: str
    unit: Literal["1", "{request}", "{request}/s", "{token}/s"]

    @property
    def is_ratio(self) -> bool:
        """True if a value is a share of a total."""
        return self.unit == "1"


METRICS: Mapping[str, LoadMetric] = {
    metric.name: metric
    for metric in (
        LoadMetric("running", "engine", "running", "{request}"),
        LoadMetric("waiting", "engine", "waiting", "{request}"),
        LoadMetric("kv_cache", "engine", "KV cache", "1"),
        LoadMetric("generation_tokens", "engine", "generated", "{token}/s"),
        LoadMetric("prompt_tokens", "engine", "prompts", "{token}/s"),
        LoadMetric("prefix_hits", "engine", "prefix cache hits", "1"),
        LoadMetric("preemptions", "engine", "preempted", "{request}/s"),
        LoadMetric("cpu", "node", "CPU", "1"),
        LoadMetric("memory", "node", "memory", "1"),
        LoadMetric("gpu", "node", "GPU", "1"),
        LoadMetric("gpu_memory", "node", "GPU memory", "1"),
    )
}
"""Metrics of load by name, in the order in which they are shown."""


@dataclass(frozen=True)
class Source:
    """An exported metric, and what its points add to the value and the total of a `LoadMetric`.

    Attributes:
        value: multiplier of a reported number before it is added to the value.
        total: multiplier of a reported number before it is added to the total.
        count: number added to the total per point; with 1, the ratio is the mean of the points.
        is_counter: whether it is a counter; pages show its growth.
        value_states: states whose numbers are added to the value; None for all.
        total_states: states whose numbers are added to the total; None for all.
        accepted: accepted values by label, empty for a missing label. Points with other values are
            dropped, since they repeat accepted points.
    """

    metric: str
    value: float = 1.0
    total: float = 0.0
    count: float = 0.0
    is_counter: bool = False
    value_states: frozenset[str] | None = None
    total_states: frozenset[str] | None = None
    accepted: Mapping[str, frozenset[str]] = field(default_factory=dict)


_MIB = float(1 << 20)
_CPU_BUSY = frozenset({"user", "system", "nice", "interrupt", "softirq", "steal", "kernel"})
_MEMORY = frozenset({"used", "free", "cached", "buffered", "buffers"})
# With priority scheduling, SGLang reports each priority, and the total under an empty priority. All
# ranks of a pipeline report the same requests.
_SGLANG_TOTALS = {"priority": frozenset({""}), "pp_rank": frozenset({"", "0"})}

SOURCES: Mapping[str, Source] = {
    "vllm:num_requests_running": Source("running"),
    "vllm:num_requests_waiting": Source("waiting"),
    "vllm:kv_cache_usage_perc": Source("kv_cache", count=1),
    "vllm:gpu_cache_usage_perc": Source("kv_cache", count=1),  # before vLLM 0.10
    "vllm:generation_tokens": Source("generation_tokens", is_counter=True),
    "vllm:prompt_tokens": Source("prompt_tokens", is_counter=True),
    "vllm:prefix_cache_hits": Source("prefix_hits", is_counter=True),
    "vllm:prefix_cache_queries": Source("prefix_hits", value=0, total=1, is_counter=True),
    "vllm:num_preemptions": Source("preemptions", is_counter=True),
    "sglang:num_running_reqs": Source("running", accepted=_SGLANG_TOTALS),
    "sglang:num_queue_reqs": Source("waiting", accepted=_SGLANG_TOTALS),
    "sglang:token_usage": Source("kv_cache", count=1),
    "sglang:generation_tokens": Source("generation_tokens", is_counter=True),
    "sglang:prompt_tokens": Source("prompt_tokens", is_counter=True),
    "sglang:cache_hit_rate": Source("prefix_hits", count=1),
    "system.cpu.time": Source("cpu", total=1, is_counter=True, value_states=_CPU_BUSY),
    "system.memory.usage": Source(
        "memory", total=1, value_states=frozenset({"used"}), total_states=_MEMORY
    ),
    "hw.gpu.utilization": Source("gpu", count=1),
    "hw.gpu.memory.usage": Source("gpu_memory"),
    "hw.gpu.memory.limit": Source("gpu_memory", value=0, total=1),
    "DCGM_FI_DEV_GPU_UTIL": Source("gpu", value=0.01, count=1),
    "DCGM_FI_DEV_FB_USED": Source("gpu_memory", value=_MIB, total=_MIB),
    "DCGM_FI_DEV_FB_FREE": Source("gpu_memory", value=0, total=_MIB),
}
"""Sources by name of the exported metric; counters without the suffix ``_total``."""


def source_of(name: str) -> Source | None:
    """Return the source of an exported metric; None if it shows no load."""
    source = SOURCES.get(name)
    if source is None and name.endswith("_total"):
        source = SOURCES.get(name.removesuffix("_total"))
        return source if source is not None and source.is_counter else None
    return source
