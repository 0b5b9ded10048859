"""`Journal`: finished groups of an asynchronous run, on disk until a checkpoint has trained them.

After a crash the run continues from its last checkpoint, and the store of the crashed run is gone.
The prompts since that checkpoint are put again in the same order. A generator that claims one of
them finds its finished group in the journal, and puts it instead of generating it again. Responses
that were in progress are in the `ResponseJournal`. So a crash costs the training since the
checkpoint, and the tokens of about a second.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from grpo_trainer.rollout.journal_file import JournalFile, places, read

KIND = "group"


@dataclass(frozen=True)
class FinishedGroup:
    """Samples of one prompt.

    Attributes:
        position: position of the prompt in the stream.
        weight_version: number of the weights that drew the group's oldest token.
        rewards: reward of each sample; a group of equal rewards that was filtered has no columns.
        columns: the columns that generators put, (samples, ...), padded; see `write_columns`.
    """

    position: int
    weight_version: int
    rewards: list[float]
    columns: dict[str, torch.Tensor]


class Journal:
    """Journal below ``folder``; this object appends to a separate file, and reads all files.

    Not thread-safe.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # The newest record of a position counts: a run that crashed twice may have two.
        self._places = {place.position: place for place in places(folder, KIND)}
        self._file = JournalFile(folder, KIND)

    def append(self, group: FinishedGroup) -> int:
        """Append a finished group; return the bytes written."""
        facts = {"weight_version": group.weight_version, "rewards": group.rewards}
        return self._file.append(group.position, facts, group.columns)

    def find(self, position: int) -> FinishedGroup | None:
        """Return the group that an earlier part of the run finished, None if no file has it."""
        place = self._places.get(position)
        columns = None if place is None else read(place)
        if place is None or columns is None:
            return None
        return FinishedGroup(position, **place.facts, columns=columns)

    def rotate(self) -> str:
        """Append to a new file from now on; return its name."""
        return self._file.rotate()
