"""Entry point of `python -m dataplane_admin`, the command ``dataplane-admin``."""

from dataplane_admin.cli import app

app()
