"""Server of the application: its socket, connections and shutdown."""

from dataplane_admin.serving.listen import listen, resolve
from dataplane_admin.serving.server import exit_cleanly_on_signals, serve, serve_on

__all__ = ["exit_cleanly_on_signals", "listen", "resolve", "serve", "serve_on"]
