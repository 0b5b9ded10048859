"""Metrics of vLLM and SGLang, read from the Prometheus text of their servers."""

from __future__ import annotations

import math
import re
import time

import httpx
from prometheus_client.parser import text_string_to_metric_families

from dataplane_admin.load_metrics import source_of
from dataplane_admin.scrape.reading import Reading, ScrapeError

MAX_BYTES = 8 << 20
MAX_READINGS = 2_000
_MAX_LABELS = 16
_MAX_LABEL = 200

_NAME = re.compile(r"[a-zA-Z_:][\w:]*")


def read_engine(url: str, timeout_s: float) -> list[Reading]:
    """Return the metrics of an engine that show its load.

    Raises ScrapeError if the engine does not answer in time, or if its answer exceeds the limits or
    has no metric of load.
    """
    readings = readings_of(_text(url, timeout_s))
    if not readings:
        raise ScrapeError("the answer has no metric of vLLM or SGLang; expected its /metrics")
    return readings


def readings_of(text: str) -> list[Reading]:
    """Return the readings of a text in Prometheus' format."""
    # Most lines are buckets of histograms. Parse only those that show load.
    lines = [line for line in text.splitlines() if _shows_load(line)]
    if len(lines) > MAX_READINGS:
        raise ScrapeError(f"{len(lines)} series of load; expected at most {MAX_READINGS}")
    try:
        return [
            Reading(
                sample.name,
                sample.value,
                {
                    name[:_MAX_LABEL]: value[:_MAX_LABEL]
                    for name, value in list(sample.labels.items())[:_MAX_LABELS]
                },
            )
            for family in text_string_to_metric_families("\n".join(lines) + "\n")
            for sample in family.samples
            if math.isfinite(sample.value)
        ]
    except ValueError as error:
        raise ScrapeError(f"the answer is not Prometheus text: {str(error)[:200]}") from error


def _shows_load(line: str) -> bool:
    name = _NAME.match(line)
    return name is not None and source_of(name[0]) is not None


def _text(url: str, timeout_s: float) -> str:
    deadline = time.monotonic() + timeout_s
    parts, size = [], 0
    headers = {"accept": "text/plain", "accept-encoding": "identity"}
    try:
        # Ignore the environment's proxies: engines run in the cluster.
        with (
            httpx.Client(timeout=timeout_s, trust_env=False) as client,
            client.stream("GET", url, headers=headers) as answer,
        ):
            if answer.status_code != 200:
                raise ScrapeError(f"answered with status {answer.status_code}")
            # httpx applies the timeout to each read, and a server may send a byte at a time.
            for part in answer.iter_raw():
                parts.append(part)
                size += len(part)
                if size > MAX_BYTES:
                    raise ScrapeError(f"the answer is larger than {MAX_BYTES} bytes")
                if time.monotonic() > deadline:
                    raise ScrapeError(f"the answer did not arrive within {timeout_s:g} s")
    except httpx.TimeoutException as error:
        raise ScrapeError(f"no answer within {timeout_s:g} s") from error
    except httpx.HTTPError as error:
        raise ScrapeError(f"cannot be reached: {str(error)[:200]}") from error
    return b"".join(parts).decode("utf-8", errors="replace")
