"""Builder of requests with the load of engines and nodes, as collectors send it."""

from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality, MetricsData

NS = 10**9
_CUMULATIVE = AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE


def _request(resource, second, points, *, sums):
    data = MetricsData()
    target = data.resource_metrics.add()
    for key, value in resource.items():
        target.resource.attributes.add(key=key).value.string_value = value
    held = {}
    for name, labels, value in points:
        if name not in held:
            metric = target.scope_metrics.add().metrics.add(name=name)
            if sums:
                metric.sum.aggregation_temporality = _CUMULATIVE
                metric.sum.is_monotonic = True
            held[name] = (metric.sum if sums else metric.gauge).data_points
        point = held[name].add(as_double=value, time_unix_nano=int(second * NS))
        for key, label in labels.items():
            point.attributes.add(key=key).value.string_value = label
    return data


def gauges(resource, second, points):
    """Return gauges of names, labels and values."""
    return _request(resource, second, points, sums=False)


def counters(resource, second, points):
    """Return cumulative counters, as `gauges`."""
    return _request(resource, second, points, sums=True)


def engine(second, *, name="node-1:8000", run="", **values):
    """Return the metrics of a vLLM server, by the names below."""
    resource = {"service.name": "vllm", "service.instance.id": name}
    resource |= {"rl.run_id": run} if run else {}
    levels = {"running": "num_requests_running", "waiting": "num_requests_waiting"}
    levels |= {"kv": "kv_cache_usage_perc"}
    grow = {"tokens": "generation_tokens_total", "prompts": "prompt_tokens_total"}
    grow |= {"hits": "prefix_cache_hits_total", "queries": "prefix_cache_queries_total"}
    grow |= {"preempted": "num_preemptions_total"}
    labels = {"engine": "0", "model_name": "tiny"}
    data = MetricsData()
    for names, build in ((levels, gauges), (grow, counters)):
        points = [(f"vllm:{names[key]}", labels, values[key]) for key in values if key in names]
        if points:
            data.MergeFrom(build(resource, second, points))
    return data


def cpu_times(processors, *, busy_s, idle_s):
    """Return the points of processors that were busy and idle for so long, summed over all."""
    shares = {"user": busy_s / 2, "system": busy_s / 2, "idle": idle_s - 1, "wait": 1}
    return [
        ("system.cpu.time", {"cpu": f"cpu{number}", "state": state}, 100 + seconds / processors)
        for number in range(processors)
        for state, seconds in shares.items()
    ]


def node(second, processors=(), *, memory=None, name="node-1"):
    """Return the metrics of a node, as the collector's receiver ``hostmetrics`` names them."""
    resource = {"host.name": name}
    data = counters(resource, second, processors)
    points = [
        ("system.memory.usage", {"state": state}, held) for state, held in (memory or {}).items()
    ]
    data.MergeFrom(gauges(resource, second, points))
    return data
