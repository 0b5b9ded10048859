"""`KeptPlan`: what a receiver reads, planned once for all versions of one structure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from refit_mx.discovery import SourceSet
from refit_mx.errors import DigestMismatchError, ProtocolError, SourceLostError
from refit_mx.manifest import Manifest
from refit_mx.plan.pieces import in_pieces
from refit_mx.plan.planner import Plan, plan_reads
from refit_mx.plan.shards import ShardTable
from refit_mx.plan.targets import TargetTensor
from refit_mx.verify import RowChecks, row_checks


@dataclass(frozen=True, eq=False)
class _Cut:
    """A plan cut into pieces, and all that it depends on."""

    shards: ShardTable
    names: tuple[str, ...]
    whole: Plan
    piece_bytes: int
    plan: Plan
    checks: tuple[RowChecks, ...]


class KeptPlan:
    """The last one. One thread at a time may use it.

    Args:
        seed: of plans, which spreads receivers over replicas.
    """

    def __init__(self, *, seed: int) -> None:
        self._seed = seed
        self._cut: _Cut | None = None

    def table_of(self, sources: SourceSet) -> ShardTable:
        """What the sources hold, in an order of theirs that is the same from version to version, so
        that the plan is: discovery has the one that was heard last first.

        Raises:
            SourceLostError: some manifests are not well formed; names their workers.
            DigestMismatchError: replicas published different bytes.
            RefitError: as `ShardTable.of`.
        """
        manifests = sorted(
            sources.manifests, key=lambda each: (each.source_slot_id, each.worker_id)
        )
        try:
            known = self._cut.shards.of_next(manifests) if self._cut is not None else None
            shards = known or ShardTable.of(manifests)
        except ProtocolError as error:
            wrong = [manifest.worker_id for manifest in manifests if not _is_well_formed(manifest)]
            if not wrong:
                raise
            raise SourceLostError(
                f"version {sources.version_id}: {len(wrong)} of {len(manifests)} manifests cannot "
                f"be used: {error}",
                tuple(wrong),
            ) from error
        _refuse_different_replicas(shards)
        return shards

    def whole(self, shards: ShardTable, targets: Sequence[TargetTensor]) -> Plan:
        """What to read of these shards, in reads of any length.

        Raises:
            LayoutError: the targets are not all there.
        """
        kept = self._cut
        if kept is not None and (kept.shards.structure, kept.names) == (
            shards.structure,
            _names(targets),
        ):
            return kept.whole
        return plan_reads(shards, targets, seed=self._seed)

    def in_pieces(
        self,
        shards: ShardTable,
        targets: Sequence[TargetTensor],
        whole: Plan,
        piece_bytes: int,
    ) -> tuple[Plan, tuple[RowChecks, ...]]:
        """A plan of `whole` in pieces, and how these are verified; kept from now on."""
        kept = self._cut
        if kept is None or kept.whole is not whole or kept.piece_bytes != piece_bytes:
            plan = in_pieces(shards, whole, piece_bytes)
            kept = _Cut(shards, _names(targets), whole, piece_bytes, plan, row_checks(shards, plan))
            self._cut = kept
        return kept.plan, kept.checks


def _names(targets: Sequence[TargetTensor]) -> tuple[str, ...]:
    return tuple(target.name for target in targets)


def _is_well_formed(manifest: Manifest) -> bool:
    try:
        ShardTable.of([manifest])
    except ProtocolError:
        return False
    return True


def _refuse_different_replicas(shards: ShardTable) -> None:
    """Refuse sources that hold the same boxes and published different bytes: what is read from
    several of them would be a mixture of two models.

    Raises:
        DigestMismatchError: there are such.
    """
    first: dict[int, Manifest] = {}
    for manifest, held in zip(shards.manifests, shards.held_of_source, strict=True):
        known = first.setdefault(held, manifest)
        if known.digests != manifest.digests:
            raise DigestMismatchError(
                f"version {manifest.version_id}: workers {known.worker_id} and "
                f"{manifest.worker_id} published different bytes of the same shards; "
                "replicas have to be equal byte for byte"
            )
