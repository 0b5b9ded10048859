"""Queries and actions of the service, shared by the API and the pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dataplane_admin.service.errors import (
    Conflict,
    NotAllowed,
    NotFound,
    Refused,
    ServiceError,
    TimedOut,
    Unavailable,
)

if TYPE_CHECKING:
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


def __getattr__(name: str) -> object:
    # The commands need only the models; importing the store is slow.
    if name == "AdminService":
        from dataplane_admin.service.service import AdminService

        return AdminService
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
