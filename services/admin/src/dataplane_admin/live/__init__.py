"""Live data plane: polled by one thread, read by requests as a snapshot."""

from dataplane_admin.live.connect import Connector, LocalConnector, RayConnector
from dataplane_admin.live.live import Live, NotAttached, QueryTimeout, TooManyQueries
from dataplane_admin.live.moment import Moment, read_moment
from dataplane_admin.live.scan import PAGE, Scan
from dataplane_admin.live.snapshot import Snapshot
from dataplane_admin.live.stuck import Stuck
from dataplane_admin.live.trend import TaskTrend, Trend

__all__ = [
    "PAGE",
    "Connector",
    "Live",
    "LocalConnector",
    "Moment",
    "NotAttached",
    "QueryTimeout",
    "RayConnector",
    "Scan",
    "Snapshot",
    "Stuck",
    "TaskTrend",
    "TooManyQueries",
    "Trend",
    "read_moment",
]
