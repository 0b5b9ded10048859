"""Synchronous GRPO on Ray, composed of the data-plane packages."""
