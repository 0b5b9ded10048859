"""Server of the application: its socket, connections and shutdown.

`serve` and `serve_on` are in the module ``server``, which is slow to import.
"""

from dataplane_admin.serving.garbage import make_collections_rare
from dataplane_admin.serving.listen import listen, resolve
from dataplane_admin.serving.signals import exit_cleanly_on_signals

__all__ = ["exit_cleanly_on_signals", "listen", "make_collections_rare", "resolve"]
