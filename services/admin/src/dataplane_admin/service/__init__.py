"""Queries and actions of the service, shared by the API and the pages."""

from dataplane_admin.service.errors import (
    Conflict,
    NotAllowed,
    NotFound,
    Refused,
    ServiceError,
    TimedOut,
    Unavailable,
)
from dataplane_admin.service.service import AdminService

__all__ = [
    "AdminService",
    "Conflict",
    "NotAllowed",
    "NotFound",
    "Refused",
    "ServiceError",
    "TimedOut",
    "Unavailable",
]
