"""Flame graph of a trace, the root on top.

A frame shows a path: all spans with the same services and names from the root down to them. It is
as wide as its share of the total time of its parent. Children that ran concurrently may
take longer in total than their parent; then they share its entire width in proportion:

    parent 10 s   |==================|        parent 10 s   |==================|
    a 5 s, b 2 s  |=== a ===|= b =|           a 15 s, b 5 s |===== a =====|= b =|
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dataplane_admin import models
from dataplane_admin.pages import words

_ROW = 20
_MIN_WIDTH = 0.15
"""Width in percent below which a path is not drawn."""
_MAX_FRAMES = 400


@dataclass(frozen=True)
class Frame:
    """A drawn path; ``key`` identifies it in URLs, ``tone`` is the color of its service."""

    key: str
    name: str
    description: str
    tone: int
    failed: bool
    above: bool
    """True if it contains the frame that is zoomed in."""
    x: float
    width: float
    y: int
    row: int


@dataclass(frozen=True)
class Flame:
    """A flame graph; ``zoomed`` is the key of the frame that has the full width, else empty."""

    frames: Sequence[Frame]
    height: int
    zoomed: str
    hidden: int
    """Number of paths left out as too narrow or too many; paths below them do not count."""


@dataclass
class _Node:
    row: models.SpanPath
    key: str
    parent: _Node | None
    children: list[_Node]

    @property
    def total_s(self) -> float:
        return self.row.total_s


def draw_flame(paths: Sequence[models.SpanPath], tones: Mapping[str, int], zoomed: str) -> Flame:
    """Draw a flame graph of paths, each parent before its children.

    ``zoomed`` is the key of the frame that gets the full width; any other text draws all paths.
    """
    tops, nodes = _nodes(paths)
    chosen = next((node for node in nodes if node.key == zoomed), None)
    ancestors: list[_Node] = []
    above = chosen.parent if chosen else None
    while above is not None:
        ancestors.insert(0, above)
        above = above.parent
    frames = [
        _frame(node, tones, 0.0, 100.0, row, above=True) for row, node in enumerate(ancestors)
    ]
    queue = _placed([chosen] if chosen else tops, 0.0, 100.0, 0.0, len(ancestors))
    hidden = 0
    while queue:
        node, x, width, row = queue.pop(0)  # by rows, so that the limit drops the lowest
        if width < _MIN_WIDTH or len(frames) >= _MAX_FRAMES:
            hidden += 1
            continue
        frames.append(_frame(node, tones, x, width, row, above=False))
        queue += _placed(node.children, x, width, node.total_s, row + 1)
    rows = 1 + max((frame.row for frame in frames), default=0)
    return Flame(frames, rows * _ROW, chosen.key if chosen else "", hidden)


def _nodes(paths: Sequence[models.SpanPath]) -> tuple[list[_Node], list[_Node]]:
    """Return the topmost nodes, and all nodes."""
    tops: list[_Node] = []
    nodes: list[_Node] = []
    ancestors: list[_Node] = []
    for row in paths:
        del ancestors[row.depth :]
        parent = ancestors[-1] if ancestors else None
        text = f"{parent.key if parent else ''}\0{row.service}\0{row.name}"
        key = hashlib.blake2b(text.encode(errors="replace"), digest_size=8).hexdigest()
        node = _Node(row, key, parent, [])
        (parent.children if parent else tops).append(node)
        nodes.append(node)
        ancestors.append(node)
    return tops, nodes


def _placed(
    siblings: Sequence[_Node], x: float, width: float, parent_s: float, row: int
) -> list[tuple[_Node, float, float, int]]:
    scale_s = max(parent_s, sum(node.total_s for node in siblings))
    placed = []
    for node in siblings:
        # Without any time, siblings share the width equally.
        part = node.total_s / scale_s if scale_s > 0 else 1 / len(siblings)
        placed.append((node, x, width * part, row))
        x += width * part
    return placed


def _frame(
    node: _Node, tones: Mapping[str, int], x: float, width: float, row: int, *, above: bool
) -> Frame:
    path = node.row
    parts = [
        path.name,
        path.service,
        words.plural(path.count, "span"),
        f"total {words.duration(path.total_s)}",
        f"self {words.duration(path.self_s)}",
    ]
    if path.errors:
        parts.append(f"{words.count(path.errors)} failed")
    return Frame(
        key=node.key,
        name=path.name,
        description=", ".join(parts),
        tone=tones[path.service],
        failed=path.errors > 0,
        above=above,
        x=round(x, 4),
        width=round(width, 4),
        y=row * _ROW,
        row=row,
    )
