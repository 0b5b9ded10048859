"""The data plane as it is now: looked into by one thread, seen by requests as a snapshot."""

from dataplane_admin.live.connect import Connector, Given, OnRay
from dataplane_admin.live.live import AskedTooLong, Live, NotAttached, TooManyAsk
from dataplane_admin.live.moment import Moment, read_moment
from dataplane_admin.live.scan import PAGE, Scan, Shares
from dataplane_admin.live.snapshot import Snapshot
from dataplane_admin.live.stuck import Stuck
from dataplane_admin.live.trend import TaskTrend, Trend

__all__ = [
    "PAGE",
    "AskedTooLong",
    "Connector",
    "Given",
    "Live",
    "Moment",
    "NotAttached",
    "OnRay",
    "Scan",
    "Shares",
    "Snapshot",
    "Stuck",
    "TaskTrend",
    "TooManyAsk",
    "Trend",
    "read_moment",
]
