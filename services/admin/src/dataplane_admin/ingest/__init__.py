"""The OTLP/HTTP receiver of the service."""

from dataplane_admin.ingest.limits import BODY_S, Limits
from dataplane_admin.ingest.redaction import Redaction, check_pattern
from dataplane_admin.ingest.routes import router

__all__ = ["BODY_S", "Limits", "Redaction", "check_pattern", "router"]
