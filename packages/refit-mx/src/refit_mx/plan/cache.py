"""`PlanCache`: the plans of the last versions, since the next one is mostly laid out alike."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from refit_mx.plan.planner import Plan, plan_reads
from refit_mx.plan.shards import ShardTable
from refit_mx.plan.target_tensors import TargetTensor

_Key = tuple[bytes, frozenset[str], str | None, int]


class PlanCache:
    """Plans by all that they depend on. One receiver has one; one thread at a time may use it.

    Args:
        most: plans to keep. A few: one of all targets, and those of retries and partial refits.

    Raises:
        ValueError: ``most`` is below 1.
    """

    def __init__(self, most: int = 4) -> None:
        if most < 1:
            raise ValueError(f"PlanCache: most {most}; expected at least 1")
        self._most = most
        self._plans: OrderedDict[tuple[_Key, int], tuple[tuple[TargetTensor, ...], Plan]] = (
            OrderedDict()
        )

    def plan(
        self,
        shards: ShardTable,
        targets: tuple[TargetTensor, ...],
        *,
        exclude: Collection[str] = (),
        prefer_local: str | None = None,
        seed: int = 0,
    ) -> Plan:
        """As `plan_reads`; made once for all versions of equal structure.

        Args:
            shards: as `plan_reads`.
            targets: told apart by identity, since comparing a hundred thousand takes as long as
                planning: keep the tuple.
            exclude: as `plan_reads`.
            prefer_local: as `plan_reads`.
            seed: as `plan_reads`.

        Raises:
            LayoutError: as `plan_reads`.
        """
        key = ((shards.structure, frozenset(exclude), prefer_local, seed), id(targets))
        known = self._plans.get(key)
        # The tuple is kept with its plan, so no other can have its identity meanwhile.
        if known is None:
            plan = plan_reads(
                shards, targets, exclude=exclude, prefer_local=prefer_local, seed=seed
            )
            known = self._plans[key] = (targets, plan)
            if len(self._plans) > self._most:
                self._plans.popitem(last=False)
        self._plans.move_to_end(key)
        return known[1]
