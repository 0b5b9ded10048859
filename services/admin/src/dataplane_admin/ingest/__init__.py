"""The OTLP/HTTP receiver of the service."""

from dataplane_admin.ingest.limits import Limits
from dataplane_admin.ingest.routes import router

__all__ = ["Limits", "router"]
