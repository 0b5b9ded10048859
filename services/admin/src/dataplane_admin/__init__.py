"""The admin service of a data plane."""

from dataplane_admin.app import create_app
from dataplane_admin.settings import Settings

__all__ = ["Settings", "create_app"]
