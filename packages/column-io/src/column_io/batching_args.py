"""The two ways to make micro-batches of rows of different length, as configuration.

Evaluated annotations (no ``from __future__ import annotations``) let the classes tell required
keys from optional ones at run time, so that a misspelt key is refused by name.
"""

from collections.abc import Mapping
from typing import Any, Literal, NotRequired, TypedDict  # Any: the values come from YAML

from column_io.packing import PACKERS
from dataplane_core import InvalidRequestError
from dataplane_core.arguments import checked_int, refused, shown
from dataplane_core.errors import listed

ORDERS = ("packer", "largest_first")


class SequencePackingArgs(TypedDict):
    """How to pack sequences end to end into micro-batches.

    Attributes:
        max_tokens_per_microbatch: most tokens in a micro-batch, padding included.
        algorithm: "concatenative" (or "order") keeps the order of the rows;
            "first_fit_decreasing" (or "largest_first") and "modified_first_fit_decreasing" need
            fewer micro-batches.
        sequence_length_pad_multiple: each sequence counts as its length rounded up to this, in
            tokens.
        input_key: column of the token ids; not read when planning.
        input_lengths_key: column of the lengths; "input_lengths" if absent. Plans made from a
            meta use the meta's lengths.
        order: in which order micro-batches are dealt to the ranks and run: as the "packer" leaves
            them (also if absent) or "largest_first".
    """

    max_tokens_per_microbatch: int
    algorithm: str
    sequence_length_pad_multiple: int
    input_key: NotRequired[str]
    input_lengths_key: NotRequired[str]
    order: NotRequired[Literal["packer", "largest_first"]]


class DynamicBatchingArgs(TypedDict):
    """How to group sequences of similar length into micro-batches padded to one width.

    Attributes:
        max_tokens_per_microbatch: most tokens in a micro-batch, rows times width.
        sequence_length_round: widths are rounded up to this, in tokens.
        input_key: column of the token ids; not read when planning.
        input_lengths_key: column of the lengths; "input_lengths" if absent. Plans made from a
            meta use the meta's lengths.
    """

    max_tokens_per_microbatch: int
    sequence_length_round: int
    input_key: NotRequired[str]
    input_lengths_key: NotRequired[str]


def check_sequence_packing_args(args: Mapping[str, Any]) -> None:
    """Raise `InvalidRequestError` naming the key of ``args`` that is missing, unknown or wrong."""
    _check_keys("sequence_packing_args", args, SequencePackingArgs)
    for key in ("max_tokens_per_microbatch", "sequence_length_pad_multiple"):
        checked_int("sequence_packing_args", key, args[key], least=1)
    _check_choice("sequence_packing_args", "algorithm", args["algorithm"], tuple(PACKERS))
    _check_choice("sequence_packing_args", "order", args.get("order", ORDERS[0]), ORDERS)


def check_dynamic_batching_args(args: Mapping[str, Any]) -> None:
    """Raise `InvalidRequestError` naming the key of ``args`` that is missing, unknown or wrong."""
    _check_keys("dynamic_batching_args", args, DynamicBatchingArgs)
    for key in ("max_tokens_per_microbatch", "sequence_length_round"):
        checked_int("dynamic_batching_args", key, args[key], least=1)


def _check_keys(name: str, args: Mapping[str, Any], declared: Any) -> None:
    if not isinstance(args, Mapping):
        raise refused("sharding", name, args, "a dict")
    required, optional = declared.__required_keys__, declared.__optional_keys__
    for what, keys in (
        ("missing", required - args.keys()),
        ("unknown", args.keys() - required - optional),
    ):
        if keys:
            raise InvalidRequestError(
                f"{name}: {what} {listed(sorted(map(str, keys)))}; expected "
                f"{listed(sorted(required))}, optionally {listed(sorted(optional))}"
            )


def _check_choice(name: str, key: str, found: object, expected: tuple[str, ...]) -> None:
    if not isinstance(found, str) or found not in expected:
        raise InvalidRequestError(
            f"{name}: {key} {shown(found)}; expected one of {listed(expected)}"
        )
