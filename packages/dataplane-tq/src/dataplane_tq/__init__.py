"""The data-plane contract on TransferQueue over Ray."""

from dataplane_tq.client import TQDataPlaneClient

__all__ = ["TQDataPlaneClient"]
