"""Server of the application: its socket, connections and shutdown.

`serve` and `serve_on` are in the module ``server``, which is slow to import.
"""

from dataplane_admin.serving.listen import listen, resolve
from dataplane_admin.serving.process import exit_cleanly_on_signals, make_collections_rare

__all__ = ["exit_cleanly_on_signals", "listen", "make_collections_rare", "resolve"]
