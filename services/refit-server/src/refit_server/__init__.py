"""Deployable control plane for weight refit."""

from refit_server.server import serve

__all__ = ["serve"]
