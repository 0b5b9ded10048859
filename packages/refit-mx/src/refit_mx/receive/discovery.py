"""Discovery of a version's sources: live publishers that answer with the right manifest.

A source is used only if it is reachable now and sends the manifest whose digest is in the control
plane. A record alone does not prove that a source is live.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np

from refit_mx.concurrency import map_calls
from refit_mx.control.client import ControlClient, VersionInfo
from refit_mx.control.records import Shard
from refit_mx.control.retry import retry_idempotent
from refit_mx.deadline import Deadline
from refit_mx.errors import (
    CompileTargetError,
    LayoutError,
    ProtocolError,
    RefitConfigError,
    SourceLostError,
)
from refit_mx.layout import Box, TargetTPLayout
from refit_mx.manifest.format import Manifest, Registry, Scalar
from refit_mx.plan.shards import ShardTable
from refit_mx.receive.source_cache import SourceCache
from refit_mx.settings import CONTROL_RETRY_S, ReceiverSettings

_MAX_NAMED = 5
MAX_CONCURRENT_CALLS = 16
"""Concurrent calls to publishers."""


@dataclass(frozen=True)
class SourceSet:
    """The readable sources of one version.

    Attributes:
        version_id: version in the control plane.
        manifests: the most recently seen source of each slot, sorted by slot; then the other
            replicas. All have the same registry if a filter was given. Empty for an empty slice.
        excluded: reason why each other source was left out, by worker id.
        missing_slots: expected slots of the version that no source fills.
        registry: how the publisher of the first manifest prepared the bytes; None if unstated.
    """

    version_id: str
    manifests: tuple[Manifest, ...]
    excluded: Mapping[str, str]
    missing_slots: tuple[str, ...]
    registry: Registry | None


@dataclass(frozen=True)
class SourceFilter:
    """Compile target and metadata that a source's registry must have.

    The targets are the accepted compile targets; None for any. The metadata has values that the
    source's metadata must have; it may have more. If neither is given, any source matches.

    Raises:
        RefitConfigError: ``targets`` is empty.
    """

    targets: AbstractSet[str] | None = None
    metadata: Mapping[str, Scalar] | None = None

    def __post_init__(self) -> None:
        if self.targets is not None and not self.targets:
            raise RefitConfigError(
                "compile_target_filter is empty; expected a compile target, or None"
            )

    def __bool__(self) -> bool:
        return self.targets is not None or bool(self.metadata)

    def __str__(self) -> str:
        targets = (
            "any compile target" if self.targets is None else " or ".join(sorted(self.targets))
        )
        return targets + (f" with {dict(self.metadata)}" if self.metadata else "")

    def mismatch(self, registry: Registry | None) -> str | None:
        """Return why a registry does not match; None if it does."""
        if registry is None:
            return "it published no compile target, and a filter is set"
        if self.targets is not None and registry.compile_target not in self.targets:
            return f"it published {_registry_text(registry)}"
        for key, value in (self.metadata or {}).items():
            published = registry.compile_metadata.get(key)
            # Types must match too: 1, 1.0 and True are equal in Python, but are different metadata.
            if type(published) is not type(value) or published != value:
                return f"it published {_registry_text(registry)}, without {key}={value!r}"
        return None


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
) -> SourceSet:
    """Find the live sources of a version, or of one slice of one of its tensors.

    No weights are moved. Sources that do not answer, or that send something other than the control
    plane lists, are left out.

    Args:
        control: client of the control plane.
        version_id: version in the control plane.
        tensor: find only sources with a part of this tensor, or of its slice ``layout``.
        layout: slice of ``tensor``.
        compile_target_filter: accepted compile targets; None for any. With this or
            ``required_compile_metadata``, a source without a registry is refused.
        required_compile_metadata: values that the source's metadata must have; it may have more.
        deadline: time limit.
        exclude: worker ids to skip.

    Raises:
        SourceLostError: no source answers.
        CompileTargetError: sources answer, but none matches the filter.
        LayoutError: no source holds a part of the slice.
        RefitConfigError: a layout is given without a tensor, or the filter is empty.
        RefitTimeoutError: the deadline passed.
        ControlError: the control plane refused the call.
    """
    if layout is not None and tensor is None:
        raise RefitConfigError("discover_v2_sources_for_slice: a layout needs a tensor")
    source_filter = SourceFilter(compile_target_filter, required_compile_metadata)
    with ExitStack() as stack:
        cache = SourceCache()
        stack.callback(cache.close)
        threads = stack.enter_context(
            ThreadPoolExecutor(MAX_CONCURRENT_CALLS, thread_name_prefix="refit-discovery")
        )
        version, shards = retry_idempotent(
            control,
            lambda client: (client.get_version(version_id), client.list_shards(version_id)),
            deadline=deadline,
            retry_s=CONTROL_RETRY_S,
        )
        answering = select_sources(
            version_id,
            shards,
            version.model_name,
            source_filter=source_filter,
            deadline=deadline,
            exclude=exclude,
            source_timeout_s=ReceiverSettings.manifest_timeout_s,
            cache=cache,
            threads=threads,
            rank=0,
        )
    missing = missing_slots(version, answering.manifests)
    if tensor is None:
        return replace(answering, missing_slots=missing)
    excluded = dict(answering.excluded)
    holding = _select_holders(answering.manifests, tensor, layout, excluded)
    return replace(answering, manifests=tuple(holding), excluded=excluded, missing_slots=missing)


def missing_slots(version: VersionInfo, manifests: Sequence[Manifest]) -> tuple[str, ...]:
    """Return the slots that a version expects and no manifest fills."""
    covered = {manifest.source_slot_id for manifest in manifests}
    return tuple(slot for slot in version.expected_source_slots if slot not in covered)


def select_sources(
    version_id: str,
    shards: Sequence[Shard],
    model_name: str,
    *,
    source_filter: SourceFilter,
    deadline: Deadline,
    exclude: Collection[str],
    source_timeout_s: float,
    cache: SourceCache,
    threads: Executor,
    rank: int,
) -> SourceSet:
    """Return the sources of listed shards that answer and match.

    Sources of another model are left out. A stopped source delays the call by at most
    ``source_timeout_s``. Receivers of different ranks start with different sources. In the result
    ``missing_slots`` stays empty, since only the version lists its slots.

    Raises:
        SourceLostError: no source answers.
        CompileTargetError: sources answer, but none matches the filter.
        RefitTimeoutError: the deadline passed.
    """
    candidates = [shard for shard in shards if shard.worker_id not in exclude]

    def ask(shard: Shard) -> Manifest | str:
        try:
            return cache.manifest(
                shard, model_name=model_name, deadline=deadline, timeout_s=source_timeout_s
            )
        except (SourceLostError, ProtocolError) as error:
            return str(error)

    # Each receiver starts at another source; otherwise all would wait for the same sources.
    first = rank * MAX_CONCURRENT_CALLS % len(candidates) if candidates else 0
    rotated = map_calls(threads, ask, [*candidates[first:], *candidates[:first]])
    answers = [*rotated[len(candidates) - first :], *rotated[: len(candidates) - first]]
    answered = [answer for answer in answers if isinstance(answer, Manifest)]
    cache.retain_only(answered)
    excluded = {
        shard.worker_id: "left out by the caller" for shard in shards if shard.worker_id in exclude
    }
    for shard, answer in zip(candidates, answers, strict=True):
        if isinstance(answer, str):
            excluded[shard.worker_id] = answer
    deadline.check("asking sources for their manifests")
    if not answered:
        raise SourceLostError(
            f"version {version_id}: none of its {len(shards)} sources answers: "
            f"{_summarize(excluded)}",
            tuple(shard.worker_id for shard in candidates),
        )
    fitting = _select_matching(version_id, answered, source_filter, excluded)
    return SourceSet(version_id, tuple(_slots_first(fitting)), excluded, (), fitting[0].registry)


def _summarize(excluded: Mapping[str, str]) -> str:
    named = [f"{worker}: {why}" for worker, why in list(excluded.items())[:_MAX_NAMED]]
    more = len(excluded) - len(named)
    return "; ".join(named) + (f"; and {more} more" if more else "") if named else "none is known"


def _slots_first(manifests: Sequence[Manifest]) -> list[Manifest]:
    """Return the first manifest of each slot, sorted by slot, then the others in their order."""
    first: dict[str, Manifest] = {}
    replicas = []
    for manifest in manifests:
        if first.setdefault(manifest.source_slot_id, manifest) is not manifest:
            replicas.append(manifest)
    return [first[slot] for slot in sorted(first)] + replicas


def _select_matching(
    version_id: str,
    manifests: Sequence[Manifest],
    source_filter: SourceFilter,
    excluded: dict[str, str],
) -> list[Manifest]:
    """Return the matching manifests with the registry that the most slots publish, or raise."""
    if not source_filter:
        return list(manifests)
    alike: list[tuple[Registry, list[Manifest]]] = []
    for manifest in manifests:
        why = source_filter.mismatch(manifest.registry)
        if why is not None or manifest.registry is None:
            excluded[manifest.worker_id] = why or ""
            continue
        for registry, group in alike:
            if registry == manifest.registry:
                group.append(manifest)
                break
        else:
            alike.append((manifest.registry, [manifest]))
    if not alike:
        published = sorted({_registry_text(manifest.registry) for manifest in manifests})
        raise CompileTargetError(
            f"version {version_id}: no source has {source_filter}; {len(manifests)} sources "
            f"publish {', '.join(published[:_MAX_NAMED])}"
        )
    alike.sort(key=lambda pair: -len({manifest.source_slot_id for manifest in pair[1]}))
    for registry, group in alike[1:]:
        for manifest in group:
            excluded[manifest.worker_id] = (
                f"it published {_registry_text(registry)}; more slots publish "
                f"{_registry_text(alike[0][0])}"
            )
    return alike[0][1]


def _registry_text(registry: Registry | None) -> str:
    if registry is None:
        return "no compile target"
    metadata = f" {dict(registry.compile_metadata)}" if registry.compile_metadata else ""
    return f"{registry.compile_target}{metadata}"


def _select_holders(
    manifests: Sequence[Manifest],
    tensor: str,
    layout: TargetTPLayout | None,
    excluded: dict[str, str],
) -> list[Manifest]:
    """Return the manifests that hold a part of a slice; raise if there is none."""
    table = ShardTable.of(manifests)
    spec = table.spec(tensor)
    wanted = Box.full(spec.shape)
    if layout is not None:
        wanted = Box.of_slices(layout.slices(spec.shape), spec.shape)
    row, axes = table.tensor_rows[tensor], len(spec.shape)
    low = np.array(wanted.start, np.int64)
    high = low + np.array(wanted.shape, np.int64)
    holding = []
    for source, manifest in enumerate(manifests):
        held = table.boxes(source)
        rows = held.tensor == row
        shared = np.minimum(held.stop[rows][:, :axes], high) - np.maximum(
            held.start[rows][:, :axes], low
        )
        if (shared > 0).all(axis=1).any():
            holding.append(manifest)
        else:
            excluded[manifest.worker_id] = f"it holds no part of {tensor} {wanted}"
    if not holding and wanted.size:
        raise LayoutError(f"{tensor} {wanted}: none of {len(manifests)} sources holds a part of it")
    return holding
