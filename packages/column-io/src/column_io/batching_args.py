"""Configuration of micro-batches from rows of different length: packing and dynamic batching.

This module has no ``from __future__ import annotations``: the classes need evaluated annotations to
know their required and optional keys at run time, so that a misspelt key is named.
"""

from collections.abc import Mapping
from typing import Any, Literal, NotRequired, TypedDict  # Any: the values come from YAML

from column_io.packing import PACKERS
from dataplane_core import InvalidRequestError
from dataplane_core.arguments import argument_type_error, checked_int, repr_with_type
from dataplane_core.errors import listed

ORDERS = ("packer", "largest_first")


class SequencePackingArgs(TypedDict):
    """Configuration that packs sequences end to end into micro-batches.

    Attributes:
        max_tokens_per_microbatch: maximum tokens in a micro-batch, including padding.
        algorithm: "concatenative" (or "order") keeps the order of the rows;
            "first_fit_decreasing" (or "largest_first") and "modified_first_fit_decreasing" need
            fewer micro-batches.
        sequence_length_pad_multiple: alignment in tokens to which each length is rounded up.
        input_key: column of the token ids; not read when planning.
        input_lengths_key: column of the lengths; default "input_lengths". Plans made from a meta
            use the meta's lengths.
        order: order in which micro-batches are assigned to ranks and run: "packer" (the default)
            keeps the packer's order; "largest_first" runs those with the most tokens first.
    """

    max_tokens_per_microbatch: int
    algorithm: str
    sequence_length_pad_multiple: int
    input_key: NotRequired[str]
    input_lengths_key: NotRequired[str]
    order: NotRequired[Literal["packer", "largest_first"]]


class DynamicBatchingArgs(TypedDict):
    """Configuration that groups sequences of similar length into micro-batches of one width.

    Attributes:
        max_tokens_per_microbatch: maximum tokens in a micro-batch, rows times width.
        sequence_length_round: alignment in tokens to which widths are rounded up.
        input_key: column of the token ids; not read when planning.
        input_lengths_key: column of the lengths; default "input_lengths". Plans made from a meta
            use the meta's lengths.
    """

    max_tokens_per_microbatch: int
    sequence_length_round: int
    input_key: NotRequired[str]
    input_lengths_key: NotRequired[str]


def check_sequence_packing_args(args: Mapping[str, Any]) -> None:
    """Raise `InvalidRequestError` that names a missing, unknown or invalid key of ``args``."""
    _check_keys("sequence_packing_args", args, SequencePackingArgs)
    for key in ("max_tokens_per_microbatch", "sequence_length_pad_multiple"):
        checked_int("sequence_packing_args", key, args[key], minimum=1)
    _check_choice("sequence_packing_args", "algorithm", args["algorithm"], tuple(PACKERS))
    _check_choice("sequence_packing_args", "order", args.get("order", ORDERS[0]), ORDERS)


def check_dynamic_batching_args(args: Mapping[str, Any]) -> None:
    """Raise `InvalidRequestError` that names a missing, unknown or invalid key of ``args``."""
    _check_keys("dynamic_batching_args", args, DynamicBatchingArgs)
    for key in ("max_tokens_per_microbatch", "sequence_length_round"):
        checked_int("dynamic_batching_args", key, args[key], minimum=1)


def _check_keys(name: str, args: Mapping[str, Any], declared: Any) -> None:
    if not isinstance(args, Mapping):
        raise argument_type_error("sharding", name, args, "a dict")
    required, optional = declared.__required_keys__, declared.__optional_keys__
    for problem, keys in (
        ("missing", required - args.keys()),
        ("unknown", args.keys() - required - optional),
    ):
        if keys:
            raise InvalidRequestError(
                f"{name}: {problem} {listed(sorted(map(str, keys)))}; expected "
                f"{listed(sorted(required))}, optionally {listed(sorted(optional))}"
            )


def _check_choice(name: str, key: str, value: object, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise InvalidRequestError(
            f"{name}: {key} {repr_with_type(value)}; expected one of {listed(choices)}"
        )
