"""HTML pages of the service."""

from dataplane_admin.pages.routes import router
from dataplane_admin.pages.shell import Shell

__all__ = ["Shell", "router"]
