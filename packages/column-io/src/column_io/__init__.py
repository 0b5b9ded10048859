"""Columns above a data-plane client: jagged codec, reads and writes, sharding over data-parallel ranks."""
