"""Renderables for terminals whose encoding lacks what they are drawn with."""

from __future__ import annotations

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.segment import Segment

# Each for one character of the same width, so that columns stay where they are.
_PLAIN = str.maketrans("├└│─█▓░\N{MULTIPLICATION SIGN}µ…", "++|-#=.xu.")


class Encodable:
    """Shows a renderable; where the terminal is not one of Unicode, in ASCII.

    There, characters of names that ASCII lacks become question marks.
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
