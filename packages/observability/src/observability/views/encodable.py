"""Renderables for terminals that lack Unicode."""

from __future__ import annotations

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.segment import Segment

# Each replacement has the same width, so that columns stay aligned.
_PLAIN = str.maketrans("├└│─█▓░\N{MULTIPLICATION SIGN}µ…", "++|-#=.xu.")


class Encodable:
    """A renderable that falls back to ASCII on a terminal without Unicode.

    There, characters without an ASCII replacement become question marks.
    """

    def __init__(self, shown: RenderableType) -> None:
        self._shown = shown

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, self._shown)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self._shown, options):
            if options.ascii_only and not segment.control:
                text = segment.text.translate(_PLAIN).encode("ascii", "replace").decode("ascii")
                yield Segment(text, segment.style)
            else:
                yield segment
