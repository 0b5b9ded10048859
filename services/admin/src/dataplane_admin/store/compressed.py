"""Compression of stored OTLP messages: raw deflate with a dictionary of their attribute names.

Names and resources repeat across messages, but hardly within a message, which is small. So without
the dictionary, messages would hardly shrink. Stored data needs exactly this dictionary: a change of
it is a migration, so new attributes are not added.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

# Names and frequent values. Deflate encodes what is nearer to the end in fewer bits.
_NAMES = """
    exception.type exception.message error.type refit.version refit.transport refit.gb_per_s
    refit.sources refit.bytes gen_ai.request.model gen_ai.usage.input_tokens
    gen_ai.usage.output_tokens db.operation.batch.size db.collection.name db.operation.name
    db.system.name messaging.batch.message_count messaging.consumer.group.name
    messaging.destination.name messaging.operation.name messaging.operation.type
    messaging.system dataplane.parts dataplane.part dataplane.wait dataplane.leased
    dataplane.links_dropped dataplane.wait_s dataplane.bytes dataplane.fields
    dataplane.samples
"""
_WORDS = """
    input_ids input_lengths generation_logprobs prev_logprobs advantages
    reference_policy_logprobs token_mask sample_mask dataplane.registered dataplane.waiting
    dataplane.answered dataplane.released dataplane.dropped dataplane.trained
    dataplane.cleared dataplane.acknowledged dataplane.claimed dataplane.read dataplane.put
"""
_VALUES = (
    ("db.system.name", "dataplane"),
    ("dataplane.bucket", "productive"),
    ("dataplane.bucket", "overhead"),
    ("dataplane.bucket", "idle"),
    *(("", name) for name in _WORDS.split()),
    ("dataplane.task", "generate"),
    ("dataplane.task", "train"),
    ("dataplane.partition", "train"),
    ("process.pid", ""),
    ("host.name", ""),
    ("service.name", "grpo."),
    ("telemetry.sdk.language", "python"),
    ("telemetry.sdk.name", "opentelemetry"),
    ("telemetry.sdk.version", "1."),
    ("rl-dataplane", ""),
    ("rl.weight_version", ""),
    ("rl.step", ""),
    ("rl.run_id", ""),
)


def _attribute(name: str, value: str = "") -> bytes:
    """Return the OTLP encoding of an attribute; without a value, its start."""
    key = b"\n%c%b\x12" % (len(name), name.encode())
    of_value = b"\n%c%b" % (len(value), value.encode())
    return key + (b"%c%b" % (len(of_value), of_value) if value else b"")


_DICTIONARY = b"".join(
    [*(_attribute(name) for name in _NAMES.split()), *(_attribute(*pair) for pair in _VALUES)]
)
_WINDOW, _MEMORY = -12, 5
"""A window of 4 kB and a small table: to set up larger ones takes longer than the compression."""
_MAX_RATIO = 20
"""Maximum ratio of compression; that of telemetry is about four. Readers expand messages in memory:
a message crafted for a ratio of a thousand would be cheap to store and expensive to read."""


def compress(message: bytes) -> bytes:
    """Compress an OTLP message for the store."""
    compressed = _deflated(message, 6)
    if len(message) > _MAX_RATIO * len(compressed):
        return _deflated(message, 0)
    return compressed


def _deflated(message: bytes, level: int) -> bytes:
    deflate = zlib.compressobj(level, zlib.DEFLATED, _WINDOW, _MEMORY, zdict=_DICTIONARY)
    return deflate.compress(message) + deflate.flush()


def expand(stored: bytes) -> bytes:
    """Return the message that `compress` compressed."""
    return zlib.decompressobj(_WINDOW, zdict=_DICTIONARY).decompress(stored)


def expand_all(stored: Iterable[bytes]) -> bytes:
    """Return several messages as one.

    Concatenated protobuf messages are one message with the fields of all.
    """
    return b"".join(map(expand, stored))
