"""The pages: what the service knows, for people in front of a browser."""

from dataplane_admin.pages.routes import router

__all__ = ["router"]
