"""`python -m dataplane_admin` is the command ``dataplane-admin``."""

from dataplane_admin.cli import app

app()
