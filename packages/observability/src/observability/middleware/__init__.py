"""Middleware that reports a client's operations as events, spans, log records and metrics."""
