"""Numbers that a scraped engine or node reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Reading:
    """A number of one metric; `load_metrics.source_of` accepts its ``name``."""

    name: str
    value: float
    attributes: Mapping[str, str]


class ScrapeError(Exception):
    """A failed scrape; the text is one line with the reason."""
