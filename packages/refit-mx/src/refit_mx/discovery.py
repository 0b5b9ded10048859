"""Finding the sources of a version: live publishers that answer, with manifests that are theirs.

Liveness is what a publisher does, not what is written about it: a source is used only if it hands
out, now, the manifest whose digest the control plane names.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np

from refit_mx.bounded_control import PATIENCE_S, patiently
from refit_mx.control.client import ControlClient, VersionInfo
from refit_mx.control.records import Shard
from refit_mx.deadline import Deadline
from refit_mx.errors import (
    CompileTargetError,
    ControlError,
    LayoutError,
    ProtocolError,
    RefitConfigError,
    RefitTimeoutError,
    SourceLostError,
)
from refit_mx.layout import TargetTPLayout
from refit_mx.manifest import Manifest, Registry, Scalar
from refit_mx.manifest_service import ManifestClient
from refit_mx.plan.shards import ShardTable
from refit_mx.side_by_side import Beside, each
from refit_mx.tensor_types import Box

_MOST_NAMED = 5
MOST_AT_ONCE = 16
"""Calls to publishers."""


@dataclass(frozen=True)
class SourceSet:
    """The sources of one version that can be read from.

    Attributes:
        version_id: of the control plane.
        manifests: one source a slot, the freshest, in the order of the slots; then their replicas.
            All were prepared in the same way.
            Empty for an empty slice.
        left_out: worker id to why it is not among them.
        missing_slots: expected slots of the version that none of them fills.
        registry: how the publishers prepared the bytes; None if they do not say.
    """

    version_id: str
    manifests: tuple[Manifest, ...]
    left_out: Mapping[str, str]
    missing_slots: tuple[str, ...]
    registry: Registry | None


def discover_v2_sources_for_slice(
    control: ControlClient,
    version_id: str,
    *,
    tensor: str | None = None,
    layout: TargetTPLayout | None = None,
    compile_target_filter: AbstractSet[str] | None = None,
    required_compile_metadata: Mapping[str, Scalar] | None = None,
    deadline: Deadline,
    exclude: Collection[str] = (),
    source_timeout_s: float = 5.0,
    manifests: ManifestClient | None = None,
    threads: Executor | None = None,
    control_patience_s: float = PATIENCE_S,
    rank: int = 0,
) -> SourceSet:
    """The live sources of a version, or of one slice of one of its tensors.

    No byte of a weight moves here. Sources that do not answer, or hand out something else than the
    control plane names, are left out.

    Args:
        control: the control plane.
        version_id: of the control plane.
        tensor: only sources that hold a part of this tensor; of all of it, or of ``layout``.
        layout: which slice of ``tensor``.
        compile_target_filter: the compile targets that can be taken; None for any. A source that
            names none is refused as soon as this or ``required_compile_metadata`` is given.
        required_compile_metadata: what the source's metadata must say, with exactly these values;
            it may say more.
        deadline: for everything.
        exclude: worker ids not to ask.
        source_timeout_s: for one source; one that has stopped costs no more.
        manifests: connections to publishers that are used again; None for new ones.
        threads: that ask; None for new ones.
        control_patience_s: for a control plane that cannot be reached.
        rank: of the receiver; different ones begin with different sources.

    Raises:
        SourceLostError: no source answers.
        CompileTargetError: sources answer, and none was prepared as asked.
        LayoutError: no source holds a part of the slice.
        RefitConfigError: a layout without a tensor, or an empty filter.
        RefitTimeoutError: the deadline passed.
        ControlError: the control plane refused.
    """
    if layout is not None and tensor is None:
        raise RefitConfigError("discover_v2_sources_for_slice: a layout needs a tensor")
    if compile_target_filter is not None and not compile_target_filter:
        raise RefitConfigError("compile_target_filter is empty; expected a compile target, or None")
    with ExitStack() as stack:
        if manifests is None:
            manifests = ManifestClient()
            stack.callback(manifests.close)
        if threads is None:
            threads = stack.enter_context(
                ThreadPoolExecutor(MOST_AT_ONCE, thread_name_prefix="refit-discovery")
            )
        version, shards = _described(control, version_id, deadline, control_patience_s, threads)
        found = answering_sources(
            version_id,
            shards,
            version.model_name,
            compile_target_filter=compile_target_filter,
            required_compile_metadata=required_compile_metadata,
            deadline=deadline,
            exclude=exclude,
            source_timeout_s=source_timeout_s,
            manifests=manifests,
            threads=threads,
            rank=rank,
        )
    missing = missing_slots(version, found.manifests)
    if tensor is None:
        return replace(found, missing_slots=missing)
    left_out = dict(found.left_out)
    holding = _holding(found.manifests, tensor, layout, left_out)
    return replace(found, manifests=tuple(holding), left_out=left_out, missing_slots=missing)


def missing_slots(version: VersionInfo, manifests: Sequence[Manifest]) -> tuple[str, ...]:
    """The slots that a version expects and no manifest fills."""
    covered = {manifest.source_slot_id for manifest in manifests}
    return tuple(slot for slot in version.expected_source_slots if slot not in covered)


def answering_sources(
    version_id: str,
    shards: Sequence[Shard],
    model_name: str,
    *,
    compile_target_filter: AbstractSet[str] | None,
    required_compile_metadata: Mapping[str, Scalar] | None,
    deadline: Deadline,
    exclude: Collection[str],
    source_timeout_s: float,
    manifests: ManifestClient,
    threads: Executor,
    rank: int,
) -> SourceSet:
    """Of the shards that the control plane lists, those whose sources answer and fit.

    Args:
        version_id: of the shards.
        shards: as they are listed.
        model_name: that the version is of; sources of another are left out.
        compile_target_filter: this and all others as of `discover_v2_sources_for_slice`.

    Returns:
        Without ``missing_slots``, which only the version tells.

    Raises:
        SourceLostError: no source answers.
        CompileTargetError: sources answer, and none was prepared as asked.
        RefitTimeoutError: the deadline passed.
    """
    asked = [shard for shard in shards if shard.worker_id not in exclude]

    def ask(shard: Shard) -> Manifest | str:
        try:
            return _manifest_of(
                shard,
                model_name,
                deadline=deadline,
                most_s=source_timeout_s,
                manifests=manifests,
            )
        except (SourceLostError, ProtocolError) as error:
            return str(error)

    # Many receivers at once would all wait for the same sources.
    first = rank * MOST_AT_ONCE % len(asked) if asked else 0
    rotated = each(threads, ask, [*asked[first:], *asked[:first]])
    answers = [*rotated[len(asked) - first :], *rotated[: len(asked) - first]]
    answered = [answer for answer in answers if isinstance(answer, Manifest)]
    manifests.structures.keep_only({answer.structure_digest for answer in answered})
    left_out = {
        shard.worker_id: "left out by the caller" for shard in shards if shard.worker_id in exclude
    }
    for shard, answer in zip(asked, answers, strict=True):
        if isinstance(answer, str):
            left_out[shard.worker_id] = answer
    deadline.check("asking sources for their manifests")
    if not answered:
        raise SourceLostError(
            f"version {version_id}: none of its {len(shards)} sources answers: {_some(left_out)}",
            tuple(shard.worker_id for shard in asked),
        )
    fitting = _prepared_as_asked(
        version_id, answered, compile_target_filter, required_compile_metadata, left_out
    )
    return SourceSet(version_id, tuple(_slots_first(fitting)), left_out, (), fitting[0].registry)


def _described(
    control: ControlClient,
    version_id: str,
    deadline: Deadline,
    patience_s: float,
    threads: Executor,
) -> tuple[VersionInfo, list[Shard]]:
    """A version and its shards, asked for at once."""

    def ask(client: ControlClient) -> tuple[VersionInfo, list[Shard]]:
        found: list[VersionInfo] = []
        beside = Beside(threads)
        try:
            beside.start(lambda: found.append(client.get_version(version_id)))
            try:
                shards = client.list_shards(version_id)
            except ControlError:
                beside.join()
                beside.check()  # that there is no such version says more
                raise
            beside.join()
        finally:
            beside.end()
        beside.check()
        return found[0], shards

    return patiently(control, ask, deadline=deadline, patience_s=patience_s)


def _manifest_of(
    shard: Shard, model_name: str, *, deadline: Deadline, most_s: float, manifests: ManifestClient
) -> Manifest:
    """Ask for a manifest, and see that it is of the shard that the control plane lists."""
    allowed = Deadline(min(most_s, deadline.check("asking for manifests")), "a manifest")
    data = manifests.fetch(
        shard.manifest_endpoint,
        shard.version_id,
        shard.source_slot_id,
        digest=shard.manifest_digest,
        deadline=deadline,
        most_s=most_s,
    )
    manifest = Manifest.decode(data)
    found = (
        manifest.model_name,
        manifest.version_id,
        manifest.source_slot_id,
        manifest.worker_id,
    )
    expected = (model_name, shard.version_id, shard.source_slot_id, shard.worker_id)
    if found != expected:
        raise ProtocolError(
            f"{shard.manifest_endpoint}: a manifest of {found}; the control plane lists {expected}"
        )
    try:
        whole = manifests.structures.complete(manifest, allowed)
    except RefitTimeoutError as error:
        raise SourceLostError(str(error), (shard.worker_id,)) from None
    manifests.known.remember(shard.manifest_endpoint, whole)
    return whole


def _some(left_out: Mapping[str, str]) -> str:
    named = [f"{worker}: {why}" for worker, why in list(left_out.items())[:_MOST_NAMED]]
    more = len(left_out) - len(named)
    return "; ".join(named) + (f"; and {more} more" if more else "") if named else "none is known"


def _slots_first(manifests: Sequence[Manifest]) -> list[Manifest]:
    """One manifest a slot, then the others; within that as they come, the freshest first."""
    first: dict[str, Manifest] = {}
    replicas = []
    for manifest in manifests:
        if first.setdefault(manifest.source_slot_id, manifest) is not manifest:
            replicas.append(manifest)
    return [first[slot] for slot in sorted(first)] + replicas


def _prepared_as_asked(
    version_id: str,
    manifests: Sequence[Manifest],
    targets: AbstractSet[str] | None,
    metadata: Mapping[str, Scalar] | None,
    left_out: dict[str, str],
) -> list[Manifest]:
    """The largest part of the manifests that match, all of one registry.

    Raises:
        CompileTargetError: none matches.
    """
    if targets is None and not metadata:
        return list(manifests)
    alike: list[tuple[Registry, list[Manifest]]] = []
    for manifest in manifests:
        why = _mismatch(manifest.registry, targets, metadata or {})
        if why is not None or manifest.registry is None:
            left_out[manifest.worker_id] = why or ""
            continue
        for registry, group in alike:
            if registry == manifest.registry:
                group.append(manifest)
                break
        else:
            alike.append((manifest.registry, [manifest]))
    if not alike:
        published = sorted({_shown(manifest.registry) for manifest in manifests})
        wanted = "any compile target" if targets is None else " or ".join(sorted(targets))
        wanted += f" with {dict(metadata)}" if metadata else ""
        raise CompileTargetError(
            f"version {version_id}: asked for {wanted}; published is "
            f"{', '.join(published[:_MOST_NAMED])} by {len(manifests)} sources"
        )
    alike.sort(key=lambda pair: -len({manifest.source_slot_id for manifest in pair[1]}))
    for registry, group in alike[1:]:
        for manifest in group:
            left_out[manifest.worker_id] = (
                f"it published {_shown(registry)}; more slots have {_shown(alike[0][0])}"
            )
    return alike[0][1]


def _shown(registry: Registry | None) -> str:
    if registry is None:
        return "no compile target"
    metadata = f" {dict(registry.compile_metadata)}" if registry.compile_metadata else ""
    return f"{registry.compile_target}{metadata}"


def _mismatch(
    registry: Registry | None, targets: AbstractSet[str] | None, metadata: Mapping[str, Scalar]
) -> str | None:
    """Why a registry does not match; None if it does."""
    if registry is None:
        return "it published no compile target, and a filter is set"
    if targets is not None and registry.compile_target not in targets:
        return f"it published {_shown(registry)}"
    for key, value in metadata.items():
        found = registry.compile_metadata.get(key)
        # By type too: 1, 1.0 and True are equal in Python, and different promises.
        if type(found) is not type(value) or found != value:
            return f"it published {_shown(registry)}, without {key}={value!r}"
    return None


def _holding(
    manifests: Sequence[Manifest],
    tensor: str,
    layout: TargetTPLayout | None,
    left_out: dict[str, str],
) -> list[Manifest]:
    """Those that hold a part of a slice that is not empty.

    Raises:
        LayoutError: none does, or no source names the tensor.
    """
    table = ShardTable.of(manifests)
    spec = table.spec(tensor)
    wanted = Box.whole(spec.shape)
    if layout is not None:
        wanted = Box.of_slices(layout.slices(spec.shape), spec.shape)
    row, axes = table.tensor_rows[tensor], len(spec.shape)
    low = np.array(wanted.start, np.int64)
    high = low + np.array(wanted.shape, np.int64)
    kept = []
    for source, manifest in enumerate(manifests):
        held = table.boxes(source)
        mine = held.tensor == row
        shared = np.minimum(held.stop[mine][:, :axes], high) - np.maximum(
            held.start[mine][:, :axes], low
        )
        if (shared > 0).all(axis=1).any():
            kept.append(manifest)
        else:
            left_out[manifest.worker_id] = f"it holds no part of {tensor} {wanted}"
    if not kept and wanted.size:
        raise LayoutError(f"{tensor} {wanted}: none of {len(manifests)} sources holds a part of it")
    return kept
