"""Decoding of facts and text of samples, see `observability.record_samples`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any  # Any: JSON

from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord

from dataplane_admin.ingest.limits import Limits
from dataplane_admin.ingest.redaction import Redaction
from dataplane_admin.ingest.refusal import RecordRefused
from dataplane_admin.ingest.values import ids_within
from dataplane_admin.store.batch import SampleFacts, SampleText
from dataplane_admin.store.chunk import MAX_INT
from dataplane_admin.store.texts import lines_of, storable
from observability.samples import MAX_CONTENT, MAX_TOKENS, TEXT
from observability.views import attributes

_INTEGERS = ("length", "first_version", "last_version")
_MAX_TURNS = 200
_MAX_TAGS = 16
_MAX_TOKEN = 200
_TOKEN_COLUMNS = ("text", "generator", "trainer", "mask", "version")


def samples_of(
    record: LogRecord,
    record_attributes: Mapping[str, Any],
    limits: Limits,
    now_ns: int,
    redaction: Redaction | None,
) -> tuple[SampleFacts | SampleText, ...]:
    """Return the facts, or the text, in a record's body; ``now_ns`` is used if it has no time.

    Raises RecordRefused if the body is not as documented.
    """
    try:
        body = json.loads(record.body.string_value)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise RecordRefused("the body is not a JSON object")
    time_ns = min(record.time_unix_nano or record.observed_time_unix_nano or now_ns, MAX_INT)
    run_id = attributes.text(record_attributes, "rl.run_id")
    step = _integer(record_attributes.get("rl.step"))
    if record.event_name == TEXT:
        [sample] = _ids([body.get("id")], limits)
        version = _integer(record_attributes.get("rl.weight_version"))
        redaction = redaction or Redaction()
        tokens, omitted = _tokens(body, redaction)
        text = {
            "turns": _turns(body, redaction),
            "tokens": tokens,
            "tokens_omitted": omitted,
            "trainer_version": version,
        }
        return (SampleText(run_id, sample, step, time_ns, json.dumps(text)),)
    ids = _ids(body.get("ids"), limits)
    columns = {name: column for name, column in body.items() if name != "ids"}
    for column in columns.values():
        if not isinstance(column, list) or len(column) != len(ids):
            raise RecordRefused("a column does not have one value per sample")
    rows = []
    for place, sample in enumerate(ids):
        facts = {name: column[place] for name, column in columns.items()}
        numbers = {name: _integer(facts.get(name)) for name in _INTEGERS}
        truncated = facts.get("truncated")
        rows.append(
            SampleFacts(
                run_id=run_id,
                sample=sample,
                time_ns=time_ns,
                step=step,
                group=_text(facts.get("group")),
                reward=_number(facts.get("reward")),
                advantage=_number(facts.get("advantage")),
                truncated=truncated if isinstance(truncated, bool) else None,
                state=_text(facts.get("state")),
                tags=_tags(facts.get("tags"), redaction or Redaction()),
                is_record=True,
                **numbers,
            )
        )
    return tuple(rows)


def _ids(given: object, limits: Limits) -> tuple[bytes, ...]:
    if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
        raise RecordRefused("the ids are not a list of strings")
    return ids_within(given, limits)


def _turns(body: Mapping[str, Any], redaction: Redaction) -> list[dict[str, str]]:
    return [
        # Cut last: a match may cross the cut.
        {key: redaction.text(str(turn.get(key, "")))[:MAX_CONTENT] for key in ("role", "content")}
        for turn in _messages(body)[:_MAX_TURNS]
    ]


def _messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    turns = body.get("turns")
    return [turn for turn in turns if isinstance(turn, dict)] if isinstance(turns, list) else []


def _tokens(body: Mapping[str, Any], redaction: Redaction) -> tuple[dict[str, list[Any]], int]:
    """Return the columns of tokens, and the number of further tokens of the sample."""
    tokens = body.get("tokens")
    if not isinstance(tokens, dict) or not isinstance(tokens.get("text"), list):
        return {}, 0
    contents = [str(turn.get("content", "")) for turn in _messages(body)]
    redacted = redaction.tokens([str(text) for text in tokens["text"]], contents)
    texts = [text[:_MAX_TOKEN] for text in redacted[:MAX_TOKENS]]
    columns: dict[str, list[Any]] = {"text": texts}
    for name in _TOKEN_COLUMNS[1:]:
        column = tokens.get(name)
        column = column[: len(texts)] if isinstance(column, list) else []
        read = _integer if name == "version" else _rounded
        column = [read(value) for value in column]
        columns[name] = column + [None] * (len(texts) - len(column))
    unrecorded = max(0, _integer(body.get("tokens_omitted")) or 0)
    return columns, min(MAX_INT, unrecorded + len(redacted) - len(texts))


def _tags(value: object, redaction: Redaction) -> str:
    """Return lines ``name=value``; values that are neither text, number nor boolean are skipped."""
    tags = value if isinstance(value, dict) else {}
    return lines_of(
        (
            f"{redaction.text(name)}="
            f"{redaction.text(tag if isinstance(tag, str) else json.dumps(tag))}"
            for name, tag in tags.items()
            if isinstance(tag, str | int | float)
        ),
        _MAX_TAGS,
    )


def _text(value: object) -> str:
    return storable(value) if isinstance(value, str) else ""


def _number(value: object) -> float | None:
    if not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer of hundreds of digits
        return None
    return number if math.isfinite(number) else None


def _rounded(value: object) -> float | None:
    """Return a number with the digits that a page shows, and one more for differences."""
    number = _number(value)
    return None if number is None else float(f"{number:.5g}")


def _integer(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if abs(value) <= MAX_INT else None
