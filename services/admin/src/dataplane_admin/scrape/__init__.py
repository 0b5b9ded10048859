"""Scraper of inference engines and of this node: sends their load as OTLP metrics."""

from dataplane_admin.scrape.scraper import engine_name, scrape

__all__ = ["engine_name", "scrape"]
