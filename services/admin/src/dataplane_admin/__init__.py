"""The admin service of a data plane."""

from dataplane_admin.app import create_app

__all__ = ["create_app"]
