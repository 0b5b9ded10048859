"""Benchmarks of the data plane, refits, tracing and admin service, as ratios within one run."""
