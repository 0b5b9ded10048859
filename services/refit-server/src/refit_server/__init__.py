"""Control plane for weight refit as a service, run by the command ``refit-server``."""
