"""`PromptFeed`: the prompts of an asynchronous run, as samples that generators fill."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from dataplane_core import DataPlaneClient
from dataplane_core.tensors.columns import object_array
from grpo_trainer.rollout.prompts import PromptStream
from grpo_trainer.samples.partition import PROMPT, TRAIN, position_of, sample_id

_PAGE = 10_000


class PromptFeed:
    """Source of an asynchronous run's prompts: first the ``pending`` ones, then the stream.

    ``pending`` has the positions of prompts that were taken, and whose samples were not trained.
    """

    def __init__(
        self,
        client: DataPlaneClient,
        stream: PromptStream,
        pending: Iterable[int],
        group_size: int,
    ) -> None:
        self._client = client
        self._stream = stream
        self._pending = deque(pending)
        self._group_size = group_size
        self._put: set[int] = set()

    def put(self, count: int) -> None:
        """Put the next ``count`` prompts, each as the samples of a group."""
        positions: list[int] = []
        while len(positions) < count:
            if self._pending:
                positions.append(self._pending.popleft())
            else:
                positions.append(self._stream.position)
                self._stream.take(1)
        rows = [
            (sample_id(position, number), self._stream.at(position).model_dump())
            for position in positions
            for number in range(self._group_size)
        ]
        if rows:
            ids, prompts = zip(*rows, strict=True)
            self._client.put_columns(list(ids), TRAIN, {PROMPT: object_array(prompts)})
            self._put.update(positions)

    def forget(self, sample_ids: Iterable[str]) -> None:
        """Record that the groups of ``sample_ids`` were cleared."""
        self._put.difference_update(map(position_of, sample_ids))

    def untrained(self) -> list[int]:
        """Return the positions of the prompts that are taken and not trained, in order."""
        stored: set[int] = set()
        start = 0
        while page := self._client.inspector.list_samples(TRAIN, start=start, limit=_PAGE):
            stored |= {position_of(sample.sample_id) for sample in page}
            start += len(page)
        # If generators clear groups between two pages, the second page skips other groups.
        self._put = {each for each in self._put if each in stored or self._is_stored(each)}
        return sorted(stored | self._put | {*self._pending})

    def _is_stored(self, position: int) -> bool:
        return self._client.inspector.read_sample(TRAIN, sample_id(position, 0)) is not None
