"""Models of all answers, shared by the API, the pages and the commands.

The store and the live data plane are read into these models directly. Times are integer nanoseconds
since 1970, named ``*_ns``; durations are seconds, named ``*_s`` or ``seconds``. An unknown number
is None; in ``requested``, ``ready`` and ``present`` of a `Wait` it is 0. Names and ids are
untrusted: escape them to show them.
"""

from dataplane_admin.models.actions import *  # noqa: F403
from dataplane_admin.models.alerts import *  # noqa: F403
from dataplane_admin.models.base import *  # noqa: F403
from dataplane_admin.models.lineage import *  # noqa: F403
from dataplane_admin.models.load import *  # noqa: F403
from dataplane_admin.models.partitions import *  # noqa: F403
from dataplane_admin.models.records import *  # noqa: F403
from dataplane_admin.models.runs import *  # noqa: F403
from dataplane_admin.models.samples import *  # noqa: F403
from dataplane_admin.models.status import *  # noqa: F403
from dataplane_admin.models.traces import *  # noqa: F403
