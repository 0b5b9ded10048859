"""Cases of the refit benchmark: a model's matrices, and the layouts between which they move.

Trainers hold equal runs of rows of each matrix, as FSDP does. Generators hold half of the matrices
by rows and half by columns, as in tensor parallelism, so half of what they need is not contiguous
at the source.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from refit_mx import Box, Cut, LocalShard, TargetTensor, TargetTPLayout, TensorSpec, tp_target

_ITEM = 2  # bfloat16


@dataclass(frozen=True)
class RefitCase:
    """Model and its two layouts.

    Attributes:
        sources: number of trainers.
        targets_count: number of generators.
        layers: number of layers, with two matrices each.
        width: width of the model; the matrices are (4 width, width) and (width, 4 width).
    """

    sources: int
    targets_count: int
    layers: int
    width: int

    @property
    def name(self) -> str:
        """Part of the names of results."""
        return f"{self.sources}to{self.targets_count}"

    @property
    def specs(self) -> list[TensorSpec]:
        """Matrices of the model: all of one kind, then all of the other."""
        specs = []
        for kind, factors in (("up", (4, 1)), ("down", (1, 4))):
            shape = tuple(factor * self.width for factor in factors)
            specs += [TensorSpec(f"{i}.{kind}", "bfloat16", shape) for i in range(self.layers)]
        return specs

    @property
    def names(self) -> list[str]:
        """Names of the matrices."""
        return [spec.name for spec in self.specs]

    @property
    def cuts(self) -> dict[str, Cut]:
        """Cuts of the generators' layout, for the publishers."""
        cuts = {}
        for spec in self.specs:
            axis = self._layout(spec, 0).shard_axis
            if axis:
                cuts[spec.name] = Cut(axis, self.targets_count)
        return cuts

    @property
    def nbytes(self) -> int:
        """Size of the model."""
        return sum(spec.nbytes for spec in self.specs)

    def shards(self, rank: int) -> list[LocalShard]:
        """Build a trainer's shards; they depend only on the rank."""
        shards = []
        for spec, box in zip(self.specs, self._held(rank), strict=True):
            shards.append(LocalShard(spec.name, spec.shape, box, _values(spec.name, rank, box)))
        return shards

    def targets(self, rank: int) -> list[TargetTensor]:
        """Return the tensors that a generator needs."""
        return [tp_target(spec, self._layout(spec, rank)) for spec in self.specs]

    def slices(
        self, source: int, target: int
    ) -> Iterator[tuple[str, tuple[slice, ...], tuple[slice, ...]]]:
        """Yield the overlaps of a trainer's shards with a generator's tensors.

        Each is a name, an index into the generator's tensor and one into the trainer's shard.
        """
        for spec, held in zip(self.specs, self._held(source), strict=True):
            wanted = Box.of_slices(self._layout(spec, target).slices(spec.shape), spec.shape)
            here, there = [], []
            for a, n, b, m in zip(held.start, held.shape, wanted.start, wanted.shape, strict=True):
                first, last = max(a, b), min(a + n, b + m)
                here.append(slice(first - b, last - b))
                there.append(slice(first - a, last - a))
            if all(part.start < part.stop for part in here):
                yield spec.name, tuple(here), tuple(there)

    def ranges(
        self, source: int, target: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the contiguous ranges that a trainer's and a generator's memory have in common.

        In both memories the tensors are concatenated.

        Returns:
            Offsets in the generator's memory, offsets in the trainer's, and sizes in bytes.
        """
        to, origin, sizes = [], [], []
        target_offsets = dict(zip(self.names, self._offsets(target, held=False), strict=True))
        source_offsets = dict(zip(self.names, self._offsets(source, held=True), strict=True))
        held = dict(zip(self.names, self._held(source), strict=True))
        specs = {spec.name: spec for spec in self.specs}
        for name, here, there in self.slices(source, target):
            wide = self._layout(specs[name], target).slices(specs[name].shape)[1]
            width, columns = wide.stop - wide.start, held[name].shape[1]
            rows = np.arange(here[0].stop - here[0].start)
            run = here[1].stop - here[1].start
            if run == width == columns:  # both contiguous: one range
                rows, run = rows[:1], run * len(rows)
            to.append(
                target_offsets[name] + _ITEM * ((here[0].start + rows) * width + here[1].start)
            )
            origin.append(
                source_offsets[name] + _ITEM * ((there[0].start + rows) * columns + there[1].start)
            )
            sizes.append(np.full(len(rows), _ITEM * run))
        if not to:
            empty = np.zeros(0, np.int64)
            return empty, empty, empty
        return np.concatenate(to), np.concatenate(origin), np.concatenate(sizes)

    def expected(self, target: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and values of the tensors that a generator must have after a refit."""
        for spec in self.specs:
            layout = self._layout(spec, target)
            matrix = torch.cat(
                [_values(spec.name, rank, self._box(spec, rank)) for rank in range(self.sources)]
            )
            yield spec.name, matrix[layout.slices(spec.shape)].contiguous()

    def target_bytes(self, rank: int) -> int:
        """Return the bytes that a generator needs."""
        return sum(target.nbytes for target in self.targets(rank))

    def source_bytes(self, rank: int) -> int:
        """Return the bytes that a trainer holds."""
        return _ITEM * sum(self.shard_elements(rank))

    def shard_elements(self, rank: int) -> list[int]:
        """Return the number of elements of each of a trainer's shards."""
        return [box.size for box in self._held(rank)]

    def _offsets(self, rank: int, *, held: bool) -> list[int]:
        sizes = (
            [_ITEM * size for size in self.shard_elements(rank)]
            if held
            else [target.nbytes for target in self.targets(rank)]
        )
        return [0, *np.cumsum(sizes)[:-1].tolist()]

    def _held(self, rank: int) -> list[Box]:
        return [self._box(spec, rank) for spec in self.specs]

    def _box(self, spec: TensorSpec, rank: int) -> Box:
        slices = TargetTPLayout(self.sources, rank).slices(spec.shape)
        return Box.of_slices(slices, spec.shape)

    def _layout(self, spec: TensorSpec, rank: int) -> TargetTPLayout:
        axis = 0 if spec.name.endswith("up") else 1
        return TargetTPLayout(self.targets_count, rank, shard_axis=axis)


def _values(name: str, rank: int, box: Box) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(map(ord, name)) * 1009 + rank)
    bits = torch.randint(-(1 << 14), 1 << 14, box.shape, dtype=torch.int16, generator=generator)
    return bits.view(torch.bfloat16)
