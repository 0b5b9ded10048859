"""Entry point of ``python -m refit_server``, the same as the command ``refit-server``."""

from refit_server.cli import app

app()
