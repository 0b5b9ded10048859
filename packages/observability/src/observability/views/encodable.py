"""Fallback to ASCII for terminals without Unicode."""

from __future__ import annotations

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.segment import Segment

# Each replacement is as wide as its character, so that columns stay aligned.
_ASCII = str.maketrans("├└│─█▓░\N{MULTIPLICATION SIGN}µ…", "++|-#=.xu.")


class AsciiFallback:
    """A renderable that is shown in ASCII on a terminal without Unicode.

    There, characters without a replacement in ASCII become question marks.
    """

    def __init__(self, renderable: RenderableType) -> None:
        self._renderable = renderable

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, self._renderable)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self._renderable, options):
            if options.ascii_only and not segment.control:
                text = segment.text.translate(_ASCII).encode("ascii", "replace").decode("ascii")
                yield Segment(text, segment.style)
            else:
                yield segment
