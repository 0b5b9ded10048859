"""`ResponseJournal`: the responses in progress of an asynchronous run, which a resume continues.

While a generation worker draws tokens, it appends the new ones to the journal about once a second
and at the end of a call. After a crash, a worker that gets the same input for the same prompt
returns the recorded tokens, and draws only the missing ones. In a conversation, the input of a
later turn contains the earlier responses, which were returned unchanged, so it is the same too.

Rows with equal input are numbered in the order of the call. Any of these rows may continue any
of their recorded responses, because all have the same distribution.

Each file is complete in itself: the first record of a response in a file holds all its tokens, and
each later one begins where the one before ended. A damaged or missing record loses the tokens
after it.

A token takes 8 bytes; a record takes about 300, and 130 for each of its rows. A checkpoint removes
the files whose prompts are all trained or dropped. What remains are the responses generated since
the checkpoint, and each file with a prompt that was pending then. If n checkpoints or crashes occur
while a response is in progress, it is stored up to n + 1 times.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any  # Any: facts are plain JSON

import torch
import xxhash

from grpo_trainer.refit.weight_sync import version_number
from grpo_trainer.rollout.journal_file import JournalFile, Place, places, read
from grpo_trainer.rollout.remote_generation import POSITIONS
from grpo_trainer.rollout.sampling import Drawn, SoFar

KIND = "response"

RECORD_EVERY_S = 1.0
"""Minimum seconds between two records of a call; the one at its end may come earlier."""

_TOKENS, _LOGPROBS, _ROWS = "token_ids", "logprobs", "rows"


@dataclass(frozen=True)
class ResponseKey:
    """Identity of a response.

    Attributes:
        position: position of its prompt in the stream.
        digest: XXH3-64 of its input and its stop strings.
        number: number of earlier rows of the call with the same position and digest.
    """

    position: int
    digest: str
    number: int


@dataclass(frozen=True)
class PartialResponse(Drawn):
    """Tokens that an earlier part of the run recorded, with the weight version of each."""

    versions: list[str]


def response_keys(
    data: Mapping[str, Any], rows: Sequence[torch.Tensor]
) -> list[ResponseKey | None]:
    """Return the key of each row of a call; None for a row without a position.

    Args:
        data: the request, with `POSITIONS` and maybe ``stop_strings``.
        rows: input of each row, int64 (length,), without padding.
    """
    keys: list[ResponseKey | None] = []
    counts: Counter[tuple[int, str]] = Counter()
    stop_strings = data.get("stop_strings") or [None] * len(rows)
    for position, row, stops in zip(data[POSITIONS], rows, stop_strings, strict=True):
        if position is None:
            keys.append(None)
            continue
        content = json.dumps([row.tolist(), list(stops or ())])
        digest = xxhash.xxh3_64_hexdigest(content.encode())
        keys.append(ResponseKey(position, digest, counts[position, digest]))
        counts[position, digest] += 1
    return keys


def version_to_report(recorded: str, installed: str) -> str:
    """Return the version to report for a token that was drawn before a crash.

    It is the recorded version, unless the crash lost its weights. Then it is the installed version,
    because the run gives the number of the lost weights to new weights.
    """
    if recorded == installed or version_number(recorded) > version_number(installed):
        return installed
    return recorded


class ResponseJournal:
    """Journal of responses below ``folder``; this object appends to a separate file.

    It finds the responses that earlier objects recorded, not its own. Its calls may overlap.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._partial: dict[ResponseKey, PartialResponse] = {}
        self._unread: dict[int, list[Place]] = defaultdict(list)
        for place in places(folder, KIND):
            self._unread[place.position].append(place)
        self._file = JournalFile(folder, KIND)
        self._attempts = itertools.count()

    def find(self, key: ResponseKey, *, installed: str) -> PartialResponse | None:
        """Return the intact beginning of a response; None if nothing of it was recorded.

        ``installed`` is the version of the installed weights.
        """
        with self._lock:
            self._partial |= _read_partial_responses(
                key.position, self._unread.pop(key.position, [])
            )
            partial = self._partial.get(key)
        if partial is None:
            return None
        return replace(
            partial, versions=[version_to_report(each, installed) for each in partial.versions]
        )

    def next_attempt(self) -> int:
        """Return a number that no other call in this process has."""
        return next(self._attempts)

    def append(
        self, position: int, attempt: int, rows: Sequence[tuple[_Row, Drawn]], versions: list[str]
    ) -> None:
        """Append the tokens of a prompt's responses that the open file lacks.

        Args:
            position: the prompt's position.
            attempt: number of the call.
            rows: rows of the call with their tokens so far.
            versions: weight version of each token that the call drew.
        """
        with self._lock:  # so that no rotation comes between two rows
            file = self._file.path.name
            facts: list[dict[str, Any]] = []
            parts: list[Drawn] = []
            for row, response in rows:
                start, end = row.recorded if row.file == file else 0, len(response.token_ids)
                spans = itertools.groupby(row.versions(start, end, versions))
                facts.append(
                    {
                        "digest": row.key.digest,
                        "number": row.key.number,
                        "attempt": attempt,
                        "start": start,
                        "end": end,
                        "versions": [[version, len(list(each))] for version, each in spans],
                    }
                )
                parts.append(Drawn(response.token_ids[start:], response.logprobs[start:]))
                row.file, row.recorded = file, end
            columns = {
                _TOKENS: torch.cat([part.token_ids for part in parts]).to(torch.int32),
                _LOGPROBS: torch.cat([part.logprobs for part in parts]),
            }
            self._file.append(position, {_ROWS: facts}, columns)

    def rotate(self) -> str:
        """Append to a new file from now on; return its name."""
        with self._lock:
            return self._file.rotate()


class CallRecorder:
    """Recorder of one call's responses, used by the call's thread.

    Args:
        journal: the journal; None records and continues nothing.
        keys: key of each row; a row with None is neither recorded nor continued.
        installed: version of the installed weights.

    Attributes:
        partial: recorded beginning of each row's response; None if nothing was recorded.
        seconds: time spent on the journal.
    """

    def __init__(
        self, journal: ResponseJournal | None, keys: Sequence[ResponseKey | None], *, installed: str
    ) -> None:
        began = time.perf_counter()
        self._journal = journal
        self._rows: dict[int, _Row] = {}
        self.partial: list[PartialResponse | None] = [None] * len(keys)
        if journal is not None:
            self._attempt = journal.next_attempt()
            for number, key in enumerate(keys):
                if key is not None:
                    partial = self.partial[number] = journal.find(key, installed=installed)
                    self._rows[number] = _Row(key, [] if partial is None else partial.versions)
        self._due_s = time.monotonic() + RECORD_EVERY_S
        self.seconds = time.perf_counter() - began

    @property
    def stream(self) -> str:
        """Suffix for the name of the call's random stream.

        Without it, a token could be drawn with the random numbers that drew an earlier token of the
        response, before the crash.
        """
        tokens = [None if each is None else each.token_ids.tolist() for each in self.partial]
        return f" after {tokens}" if any(tokens) else ""

    def continued_tokens(self, responses: Sequence[Drawn]) -> int:
        """Return how many tokens of the call's responses were recorded before the call."""
        return sum(
            min(len(partial.token_ids), len(response.token_ids))
            for partial, response in zip(self.partial, responses, strict=True)
            if partial is not None
        )

    def record_if_due(self, so_far: SoFar, versions: list[str]) -> None:
        """Append new tokens, if `RECORD_EVERY_S` have passed since the last record."""
        if self._rows and time.monotonic() >= self._due_s:
            self.record(so_far(), versions)

    def record(self, responses: Sequence[Drawn], versions: list[str]) -> None:
        """Append the tokens that are new.

        Args:
            responses: tokens so far of each row of the call.
            versions: weight version of each token that the call drew.
        """
        if self._journal is None:
            return
        began = time.perf_counter()
        by_position: dict[int, list[tuple[_Row, Drawn]]] = defaultdict(list)
        for number, row in self._rows.items():
            response = responses[number]
            if len(response.token_ids) > row.recorded:
                by_position[row.key.position].append((row, response))
        for position, new in by_position.items():
            self._journal.append(position, self._attempt, new, versions)
        self._due_s = time.monotonic() + RECORD_EVERY_S
        self.seconds += time.perf_counter() - began


@dataclass
class _Row:
    """State of a recorded row.

    Attributes:
        key: its identity.
        prefix_versions: weight version of each token that an earlier part of the run drew.
        file: name of the file that has its first ``recorded`` tokens.
    """

    key: ResponseKey
    prefix_versions: list[str]
    file: str = ""
    recorded: int = 0

    def __post_init__(self) -> None:
        self.recorded = len(self.prefix_versions)  # in a file of an earlier part of the run

    def versions(self, start: int, end: int, drawn: list[str]) -> list[str]:
        """Return the versions of tokens ``start`` to ``end``: the prefix, then ``drawn``."""
        before = len(self.prefix_versions)
        return (
            self.prefix_versions[start:end] + drawn[max(0, start - before) : max(0, end - before)]
        )


@dataclass(frozen=True)
class _Part:
    """Consecutive tokens of a response, of one record."""

    attempt: tuple[Path, int]
    start: int
    tokens: PartialResponse


def _read_partial_responses(
    position: int, records: Sequence[Place]
) -> dict[ResponseKey, PartialResponse]:
    """Return the intact beginnings of the responses at ``position``, from records in order."""
    parts: dict[ResponseKey, list[_Part]] = defaultdict(list)
    for place in records:
        for key, part in _parts(place):
            if part.start == 0:
                parts[key] = [part]
            elif parts[key] and _continues(part, parts[key][-1]):
                parts[key].append(part)
    return {
        key: PartialResponse(
            torch.cat([part.tokens.token_ids for part in each]),
            torch.cat([part.tokens.logprobs for part in each]),
            [version for part in each for version in part.tokens.versions],
        )
        for key, each in parts.items()
        if each and key.position == position
    }


def _continues(part: _Part, last: _Part) -> bool:
    # Another call may have drawn other tokens for the same response.
    return part.attempt == last.attempt and part.start == last.start + len(last.tokens.token_ids)


def _parts(place: Place) -> Iterator[tuple[ResponseKey, _Part]]:
    columns = read(place)
    if columns is None:
        return
    begin = 0
    for facts in place.facts[_ROWS]:
        end = begin + facts["end"] - facts["start"]
        yield (
            ResponseKey(place.position, facts["digest"], facts["number"]),
            _Part(
                (place.path, facts["attempt"]),
                facts["start"],
                PartialResponse(
                    columns[_TOKENS][begin:end].long(),
                    columns[_LOGPROBS][begin:end],
                    [version for version, count in facts["versions"] for _ in range(count)],
                ),
            ),
        )
        begin = end
