"""A generator of trace and span ids that does not depend on the seed of `random`.

OpenTelemetry's own generator draws ids from `random`. Trainers seed `random`, often with the same
number on each rank and in each run. With that generator, spans of different ranks and runs would
have the same ids.
"""

from __future__ import annotations

from random import SystemRandom

from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

_system = SystemRandom()


class SeedlessIdGenerator(RandomIdGenerator):
    """A generator that draws ids from the operating system's random numbers."""

    def generate_span_id(self) -> int:
        """Return a span id: 64 bits, not all of them zero."""
        return _system.getrandbits(64) or self.generate_span_id()

    def generate_trace_id(self) -> int:
        """Return a trace id: 128 bits, not all of them zero."""
        return _system.getrandbits(128) or self.generate_trace_id()
