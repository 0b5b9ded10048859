"""HTML pages of the service."""

from dataplane_admin.pages.routes import router

__all__ = ["router"]
