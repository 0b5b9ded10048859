"""Deployable control plane for weight refit."""
