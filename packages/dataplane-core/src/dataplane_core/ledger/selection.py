"""What a claim asks for, and how a drawn batch is split over data-parallel ranks."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any  # Any: tags hold the caller's own primitives

from dataplane_core.errors import InvalidRequestError
from dataplane_core.tags import primitive

_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "in": lambda found, wanted: found in wanted,
}


def narrowing(
    dp_world: int | None,
    where: Sequence[TagFilter],
    seed: int | None,
    wait_for_leased: bool = True,
) -> dict[str, Any]:
    """What narrows a claim, as keywords of `claim_meta`: those alone that are given.

    An adapter written for the published contract knows none of them, and serves every claim that
    does not ask for one.
    """
    asked: dict[str, Any] = {} if dp_world is None else {"dp_world": dp_world}
    # The client checks what is passed on, so nothing here may fail on a value of another type.
    if not isinstance(where, list | tuple) or where:
        asked["where"] = where
    if seed is not None:
        asked["seed"] = seed
    if wait_for_leased is not True:
        asked["wait_for_leased"] = wait_for_leased
    return asked


@dataclass(frozen=True)
class TagFilter:
    """A condition on one tag, as ``TagFilter("weight_version", ">=", 3)``.

    A sample without the tag, or whose tag cannot be compared with ``value``, does not match.

    Attributes:
        tag: name of the tag.
        op: one of ``== != < <= > >= in``.
        value: what the tag is compared with, a primitive as tags are; for ``in`` a list of them,
            which is kept as a tuple.

    Raises:
        InvalidRequestError: (a ValueError) on another operator, or a value that no tag can have.
    """

    tag: str
    op: str
    value: Any

    def __post_init__(self) -> None:
        if self.op not in _OPERATORS:
            raise InvalidRequestError(
                f"filter on tag {self.tag!r}: operator {self.op!r}; expected one of "
                f"{' '.join(_OPERATORS)}"
            )
        if self.op == "in" and not isinstance(self.value, list | tuple | set | frozenset):
            raise InvalidRequestError(
                f"filter on tag {self.tag!r}: 'in' needs a list, found {self.value!r}"
            )
        try:
            value: Any = (
                tuple(primitive(each) for each in self.value)
                if self.op == "in"
                else primitive(self.value)
            )
        except InvalidRequestError as error:
            raise InvalidRequestError(f"filter on tag {self.tag!r}: {error}") from None
        if isinstance(self.value, set | frozenset):
            value = tuple(sorted(value, key=repr))  # in the same order in every process
        object.__setattr__(self, "value", value)

    def matches(self, tags: Mapping[str, Any]) -> bool:
        """Whether a sample with these tags passes."""
        if self.tag not in tags:
            return False
        try:
            return bool(_OPERATORS[self.op](tags[self.tag], self.value))
        except TypeError:
            return False


@dataclass(frozen=True)
class RankGroup:
    """Data-parallel ranks that ask for the same, and so share what one of them draws.

    In whatever order each of them names fields and conditions.
    """

    required: frozenset[str]
    where: frozenset[TagFilter]
    seed: int | None
    world: int


@dataclass(frozen=True)
class ClaimRequest:
    """One claim, as `PartitionBook.claim` decides it.

    Attributes:
        task_name: the claiming task.
        required_fields: fields that a sample must have.
        batch_size: most samples to claim; with groups a multiple of the group's size.
        whole: take a full batch or, once nothing more can come, the remainder; else what is ready.
        where: conditions that a sample's tags must all meet.
        seed: claim in an order that depends on this and the ids alone; None is the order of puts.
        dp_rank: the caller's data-parallel rank; with ``dp_world`` it gets the rank's share.
        dp_world: ranks that share each drawn batch of ``dp_world * batch_size`` samples.
        lease_s: seconds after which the claim ends unless settled; None is a final claim.
        owner: "host:pid" of the claiming process, for who looks at its lease.
        wait_for_leased: with ``whole`` and nothing ready, wait for samples that are leased.
    """

    task_name: str
    required_fields: tuple[str, ...]
    batch_size: int
    whole: bool = False
    where: tuple[TagFilter, ...] = ()
    seed: int | None = None
    dp_rank: int | None = None
    dp_world: int | None = None
    lease_s: float | None = None
    owner: str = ""
    wait_for_leased: bool = True

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise InvalidRequestError(
                f"claim_meta: batch_size {self.batch_size}; expected at least 1"
            )
        if self.dp_world is not None and (
            self.dp_rank is None or not 0 <= self.dp_rank < self.dp_world
        ):
            raise InvalidRequestError(
                f"claim_meta: dp_rank {self.dp_rank} with dp_world {self.dp_world}; expected a "
                "rank from 0 up to dp_world"
            )

    def matches(self, tags: Mapping[str, Any]) -> bool:
        """Whether a sample with these tags passes every condition."""
        return all(condition.matches(tags) for condition in self.where)

    @property
    def group(self) -> RankGroup | None:
        """The ranks that share what this claim draws; None without ``dp_world``."""
        if self.dp_world is None:
            return None
        required, where = frozenset(self.required_fields), frozenset(self.where)
        return RankGroup(required, where, self.seed, self.dp_world)


def balance(lengths: Sequence[int], world: int) -> list[list[int]]:
    """Split items over ranks so that counts are even and lengths add up about equally.

    Longest first, each to the lightest rank that still has room (LPT with a cap on the count).

    Args:
        lengths: the weight of each item, tokens for example.
        world: number of ranks.

    Returns:
        For each rank the indices of its items, ascending. Counts differ by at most one.
    """
    small, larger = divmod(len(lengths), world)
    shares: list[list[int]] = [[] for _ in range(world)]
    loads = [0] * world
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        full = sum(len(share) > small for share in shares)
        roomy = [
            rank
            for rank, share in enumerate(shares)
            if len(share) < small or (len(share) == small and full < larger)
        ]
        rank = min(roomy, key=lambda rank: (loads[rank], rank))
        shares[rank].append(index)
        loads[rank] += lengths[index]
    return [sorted(share) for share in shares]
