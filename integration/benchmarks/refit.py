"""How fast new weights reach generators: refit-mx beside what else could carry the same bytes.

Every way runs in the same processes, one Ray actor a trainer and a generator, in shuffled rounds. A
way has up to two steps: the trainers make the weights available, the generators take what they
need. Gloo has the second alone, in which both take part.
"""

from __future__ import annotations

import random
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any  # Any: Ray handles have no static types

import numpy as np
import ray
from integration.benchmarks.harness import Summary
from integration.benchmarks.refit_cases import RefitCase
from integration.benchmarks.refit_worker import MODEL, RefitWorker, Took, together
from integration.benchmarks.results_file import Entry

from dataplane_tq import start_local_ray
from refit_mx import ControlClient, EmbeddedControlServer

REFIT_HEADINGS = [
    "way",
    "offer, p50 ms",
    "take, p50 ms",
    "IQR",
    "GB/s",
    "ours over NIXL / this (IQR)",
    "both steps: ours over NIXL / this (IQR)",
    "both steps: ours over shared memory / this (IQR)",
    "both steps, p50 ms",
]
STAGE_HEADINGS = ["ours over", "stage", "p50 ms, longest of the generators"]

_OURS = ("nixl", "tcp", "shm")
_MEMORY_WAYS = ("nixl", "tcp", "raw_nixl", "raw_nixl_long", "memcpy")
_PROCESS_WAYS = ("nixl", "shm", "gloo", "ray")
_FILE_WAYS = ("nixl", "file")
_WAYS = (*_MEMORY_WAYS, *_PROCESS_WAYS[1:], *_FILE_WAYS[1:])
_QUICK_WAYS = (*_PROCESS_WAYS, "raw_nixl")
_LAYOUTS = ((1, 1), (2, 4), (4, 2))
_QUICK_ROUNDS, _FULL_ROUNDS = 5, 9
_WARM_UPS = 2
SEED = 20_265
_START_S = 300.0
_OBJECT_STORE_BYTES = 5 << 30


@dataclass(frozen=True)
class RefitResult:
    """One case.

    Attributes:
        case: what moved.
        offer: by way, seconds of the trainers' step in each round.
        take: by way, seconds of the generators' step in each round.
        rounds: by way, the numbers of the rounds that it was in.
        stages: by transport of ours and stage, seconds in each round.
    """

    case: RefitCase
    offer: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    take: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    rounds: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    stages: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))

    @property
    def title(self) -> str:
        """For a table."""
        case = self.case
        return (
            f"Refit of {case.nbytes / 2**30:.3g} GiB, {case.sources} trainers to "
            f"{case.targets_count} generators"
        )

    def faster(self, way: str, *, ours: str = "nixl", whole: bool = False) -> Summary | None:
        """How many times as fast ours is, the taking alone or both steps; 0.9 for ours taking 1.11
        times as long. Of the rounds that had both, None if there were none.

        Args:
            way: that ours is compared with.
            ours: over which transport.
            whole: both steps.
        """
        common = sorted(set(self.rounds[ours]) & set(self.rounds[way]))
        if not common:
            return None
        mine = self._seconds(ours, common, whole=whole)
        other = self._seconds(way, common, whole=whole)
        rounds = Summary.of(list(other / mine))
        return Summary(
            float(np.median(other) / np.median(mine)), rounds.p99, rounds.spread, rounds.count
        )

    def _seconds(self, way: str, rounds: Sequence[int], *, whole: bool) -> Any:
        index = [self.rounds[way].index(each) for each in rounds]
        taken = np.array(self.take[way])[index]
        return taken + np.array(self.offer[way])[index] if whole and self.offer[way] else taken

    def rows(self) -> list[list[str]]:
        """For a table with `REFIT_HEADINGS`."""
        found = []
        for way in self.take:
            take = Summary.of(self.take[way])
            ratios = (
                None if way == "nixl" else self.faster(way),
                None if way == "nixl" else self.faster(way, whole=True),
                None if way == "shm" else self.faster(way, ours="shm", whole=True),
            )
            found.append(
                [
                    way,
                    f"{Summary.of(self.offer[way]).value * 1e3:.0f}" if self.offer[way] else "",
                    f"{take.value * 1e3:.0f}",
                    f"{take.spread * 1e3:.0f}",
                    f"{self.case.nbytes / take.value / 1e9:.2f}",
                    *(f"{each.value:.2f} ({each.spread:.2f})" if each else "" for each in ratios),
                    f"{np.median(self._seconds(way, self.rounds[way], whole=True)) * 1e3:.0f}",
                ]
            )
        return found

    def stage_rows(self) -> list[list[str]]:
        """For a table with `STAGE_HEADINGS`."""
        return [
            [way, stage, f"{Summary.of(seconds).value * 1e3:.1f}"]
            for (way, stage), seconds in self.stages.items()
            if any(seconds)
        ]

    def entries(self) -> list[Entry]:
        """For the file of results."""
        size = "" if self.case.nbytes == QUICK_CASE.nbytes else f"_{self.case.nbytes >> 30}g"
        found = []
        for way in self.take:
            take = Summary.of(self.take[way])
            rate = self.case.nbytes / take.value / 1e9
            name = f"refit.{way}_{self.case.name}{size}"
            found.append(Entry(f"{name}.gb_per_s", rate, "GB/s", None, 0.0, take.count))
            for ours in ("nixl", "shm"):
                for suffix, whole in (("", False), ("_both_steps", True)):
                    ratio = self.faster(way, ours=ours, whole=whole)
                    if way != ours and ratio is not None:
                        named = f"refit.{ours}_{self.case.name}{size}.ratio_vs_{way}{suffix}"
                        found.append(Entry(named, ratio.value, "x", way, ratio.spread, ratio.count))
        return found


def _sized(nbytes: int, sources: int, targets: int) -> RefitCase:
    width = 2048
    return RefitCase(sources, targets, nbytes // (2 * 2 * 4 * width * width), width)


QUICK_CASE = _sized(1 << 29, 2, 4)


def measure_refit(tell: Callable[[str], None], *, full: bool) -> list[RefitResult]:
    """Run the cases; starts and stops a Ray and a control plane of its own, a case.

    Args:
        tell: called with what is measured next.
        full: every case, or the small one.
    """
    if not full:
        tell("refits")
        return [_measure(QUICK_CASE, (_QUICK_WAYS,), _QUICK_ROUNDS)]
    found = []
    for nbytes in (1 << 29, 1 << 31):
        for sources, targets in _LAYOUTS:
            case = _sized(nbytes, sources, targets)
            tell(f"refits of {nbytes >> 20} MiB, {case.name}")
            # The copies that all ways make of 2 GiB do not fit into 24 GiB of memory at once.
            large = nbytes > 1 << 30
            groups = (_MEMORY_WAYS, _PROCESS_WAYS, _FILE_WAYS) if large else (_WAYS,)
            found.append(_measure(case, groups, 5 if large else _FULL_ROUNDS))
    return found


def _measure(case: RefitCase, groups: Sequence[Sequence[str]], rounds: int) -> RefitResult:
    result = RefitResult(case)
    for group, ways in enumerate(groups):
        _measure_beside(result, ways, range(group * rounds, (group + 1) * rounds))
    return result


def _measure_beside(result: RefitResult, ways: Sequence[str], rounds: Sequence[int]) -> None:
    """Measure some ways, in turns.

    Args:
        result: added to.
        ways: in each round, in another order.
        rounds: their numbers, of which the result has none yet.
    """
    case = result.case
    order = random.Random(SEED)
    with _processes(case, "ray" in ways) as actors, _Ways(actors) as run:
        run.prepare(ways)
        for number in (*range(-_WARM_UPS, 0), *rounds):
            for way in order.sample(ways, len(ways)):
                offer, take = run.once(way)
                if number < 0:
                    continue
                result.rounds[way].append(number)
                if offer:
                    result.offer[way].append(together(offer))
                result.take[way].append(together(take))
                for stage in take[0].stages:
                    longest = max(one.stages[stage] for one in take)
                    result.stages[way, stage].append(longest)


@dataclass(frozen=True)
class _Actors:
    case: RefitCase
    sources: list[Any]
    targets: list[Any]


@contextmanager
def _processes(case: RefitCase, with_store: bool) -> Iterator[_Actors]:
    with tempfile.TemporaryDirectory(prefix="bench-refit-") as folder:
        start_local_ray(
            num_cpus=8,
            object_store_memory=_OBJECT_STORE_BYTES if with_store else 100 << 20,
            include_dashboard=False,
            _temp_dir=folder,
            namespace="benchmarks",
            logging_level="ERROR",
            log_to_driver=False,
        )
        try:
            worker: Any = ray.remote(RefitWorker).options(num_cpus=0.1)
            actors = _Actors(
                case,
                [worker.remote(case, rank, source=True) for rank in range(case.sources)],
                [worker.remote(case, rank, source=False) for rank in range(case.targets_count)],
            )
            everybody = [*actors.sources, *actors.targets]
            ray.get([actor.ready.remote() for actor in everybody], timeout=_START_S)
            yield actors
            ray.get([actor.close.remote() for actor in everybody], timeout=60)
        finally:
            ray.shutdown()


class _Ways:
    """Runs one round of a way on the actors."""

    def __init__(self, actors: _Actors) -> None:
        self._actors = actors
        self._versions = 0
        self._folder = tempfile.TemporaryDirectory(prefix="bench-refit-", dir="/dev/shm")

    def __enter__(self) -> _Ways:
        self._server = EmbeddedControlServer()
        self._control = ControlClient(self._server.address)
        return self

    def __exit__(self, *_: object) -> None:
        self._control.close()
        self._server.close()
        self._folder.cleanup()

    def prepare(self, ways: Sequence[str]) -> None:
        """What each needs once, before anything is timed; checks what ours brings."""
        sources, targets = self._actors.sources, self._actors.targets
        ours = [way for way in _OURS if way in ways]
        _all([*sources, *targets], "join", self._server.address, ours)
        for transport in ours:
            version = self._version()
            _all(sources, "publish", version)
            _all(targets, "check", version, transport)
        if "raw_nixl" in ways:
            offers = _all(sources, "offer_raw")
            _all(targets, "prepare_raw", offers)
        if "gloo" in ways:
            # A file: a free port may be somebody else's by the time that gloo binds it.
            meeting = f"file://{self._folder.name}/gloo"
            everybody = [*sources, *targets]
            ray.get(
                [
                    actor.join_gloo.remote(meeting, rank, len(everybody))
                    for rank, actor in enumerate(everybody)
                ],
                timeout=_START_S,
            )

    def once(self, way: str) -> tuple[list[Took], list[Took]]:
        """What the trainers did, and what the generators did."""
        sources, targets = self._actors.sources, self._actors.targets
        if way in _OURS:
            version = self._version()
            offer = _all(sources, "publish", version)
            return offer, _all(targets, "receive", version, way)
        if way in ("raw_nixl", "raw_nixl_long"):
            return [], _all(targets, "read_raw", way == "raw_nixl_long")
        if way == "gloo":
            return [], _all([*sources, *targets], "broadcast")
        if way == "ray":
            put = _all(sources, "put_ray")
            return [took for took, _ in put], _all(targets, "get_ray", [some for _, some in put])
        if way == "file":
            saved = _all(sources, "save_file", self._folder.name)
            return saved, _all(targets, "load_file", self._folder.name)
        return [], _all(targets, "copy")

    def _version(self) -> str:
        self._versions += 1
        version = f"v{self._versions}"
        slots = [f"s{rank}" for rank in range(self._actors.case.sources)]
        self._control.create_version(MODEL, slots, idempotency_key=version, version_id=version)
        return version


def _all(actors: Sequence[Any], method: str, *args: Any) -> list[Any]:
    found: list[Any] = ray.get(
        [getattr(actor, method).remote(*args) for actor in actors], timeout=_START_S
    )
    return found
