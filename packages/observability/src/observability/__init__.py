"""Middleware that makes a data plane visible: metrics per operation."""
