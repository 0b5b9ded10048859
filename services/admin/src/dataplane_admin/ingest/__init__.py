"""The OTLP/HTTP receiver of the service."""

from dataplane_admin.ingest.limits import Limits
from dataplane_admin.ingest.routes import router
from dataplane_admin.ingest.values import unique_label

__all__ = ["Limits", "router", "unique_label"]
