"""Views of a run: steps, critical paths, bubbles, lineages of samples, waits.

They are derived from `observability.records.Records`, during a run or afterwards. They need the
extra ``observability[views]``.
"""

from observability.views.critical_path import Segment, critical_path
from observability.views.figures import StageBytes, Waste, bytes_by_stage, slowest, waste
from observability.views.html import page_of, write_page
from observability.views.lineage import LineageEvent, SampleNotFound, lineage_of, runs_of_sample
from observability.views.perfetto import chrome_trace, write_perfetto
from observability.views.printable import printable
from observability.views.processes import ProcessTime, bucket_seconds, process_times
from observability.views.steps import Staleness, Step, step_of_trace, steps_of
from observability.views.terminal import lineage_view, print_view, step_view, steps_view, waits_view
from observability.views.tree import Tree
from observability.views.why import MissingField, OpenWait, why

__all__ = [
    "LineageEvent",
    "MissingField",
    "OpenWait",
    "ProcessTime",
    "SampleNotFound",
    "Segment",
    "StageBytes",
    "Staleness",
    "Step",
    "Tree",
    "Waste",
    "bucket_seconds",
    "bytes_by_stage",
    "chrome_trace",
    "critical_path",
    "lineage_of",
    "lineage_view",
    "page_of",
    "print_view",
    "printable",
    "process_times",
    "runs_of_sample",
    "slowest",
    "step_of_trace",
    "step_view",
    "steps_of",
    "steps_view",
    "waits_view",
    "waste",
    "why",
    "write_page",
    "write_perfetto",
]
