"""`python -m refit_server` is the command ``refit-server``."""

from refit_server.cli import app

app()
