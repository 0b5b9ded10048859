"""API routes: JSON under ``/api/v1``, live updates, probes and metrics."""

from dataplane_admin.api.errors import add_error_handlers
from dataplane_admin.api.openapi import add_openapi
from dataplane_admin.api.routes import routers
from dataplane_admin.api.updates import LiveUpdates

__all__ = ["LiveUpdates", "add_error_handlers", "add_openapi", "routers"]
