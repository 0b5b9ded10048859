"""Alerts: rules, their evaluation, and webhooks.

The service provides the facts. From the store, this package reads only alerts and notifications.
"""

from dataplane_admin.alerts.evaluate import TELEMETRY, Facts, RunFacts, metrics_of
from dataplane_admin.alerts.rules import AlertRules, load_rules, rules_schema
from dataplane_admin.alerts.watch import Watch

__all__ = [
    "TELEMETRY",
    "AlertRules",
    "Facts",
    "RunFacts",
    "Watch",
    "load_rules",
    "metrics_of",
    "rules_schema",
]
