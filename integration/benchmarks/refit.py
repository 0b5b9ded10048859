"""Duration of a refit with refit-mx, and with other ways to move the same bytes.

All ways run in the same processes, one Ray actor per trainer and generator, in shuffled rounds. A
way has up to two steps: the trainers publish weights, the generators fetch what they need. Gloo has
only the second step, in which both take part.
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
from integration.benchmarks.refit_cases import RefitCase
from integration.benchmarks.refit_worker import MODEL, RefitWorker, Timing, total_seconds
from integration.benchmarks.results_file import Entry
from integration.benchmarks.summary import Summary
from integration.temporary_ray import temporary_ray

from refit_mx import ControlClient, EmbeddedControlServer

REFIT_HEADINGS = [
    "way",
    "publish, p50 ms",
    "fetch, p50 ms",
    "IQR",
    "GB/s",
    "fetch: this / refit-mx NIXL (IQR)",
    "both steps: this / refit-mx NIXL (IQR)",
    "both steps: this / refit-mx shared memory (IQR)",
    "both steps, p50 ms",
]
STAGE_HEADINGS = ["refit-mx over", "stage", "p50 ms, slowest generator"]

_REFIT_MX = ("nixl", "tcp", "shm")
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
    """Result of one case.

    Attributes:
        case: the model and its layouts.
        publish: way to the seconds of the trainers' step in each round.
        fetch: way to the seconds of the generators' step in each round.
        rounds: way to the numbers of its rounds.
        stages: refit-mx's transport and stage to the seconds in each round.
    """

    case: RefitCase
    publish: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    fetch: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    rounds: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    stages: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))

    @property
    def title(self) -> str:
        """Title of the case's tables."""
        case = self.case
        return (
            f"Refit of {case.nbytes / 2**30:.3g} GiB, {case.sources} trainers to "
            f"{case.targets_count} generators"
        )

    def ratio(
        self, way: str, *, transport: str = "nixl", both_steps: bool = False
    ) -> Summary | None:
        """Return the duration of a way, divided by that of refit-mx, over their common rounds.

        Args:
            way: the other way.
            transport: refit-mx's transport.
            both_steps: compare publish and fetch; if False, fetch only.

        Returns:
            The ratio, larger than 1 if refit-mx is faster; None if there are no common rounds.
        """
        common = sorted(set(self.rounds[transport]) & set(self.rounds[way]))
        if not common:
            return None
        refit_mx = self._seconds(transport, common, both_steps=both_steps)
        other = self._seconds(way, common, both_steps=both_steps)
        return Summary.of_ratio(other, refit_mx)

    def _seconds(self, way: str, rounds: Sequence[int], *, both_steps: bool) -> Any:
        index = [self.rounds[way].index(each) for each in rounds]
        fetch = np.array(self.fetch[way])[index]
        if both_steps and self.publish[way]:
            return fetch + np.array(self.publish[way])[index]
        return fetch

    def rows(self) -> list[list[str]]:
        """Return rows for a table with `REFIT_HEADINGS`."""
        rows = []
        for way in self.fetch:
            fetch = Summary.of(self.fetch[way])
            publish = self.publish[way]
            ratios = (
                None if way == "nixl" else self.ratio(way),
                None if way == "nixl" else self.ratio(way, both_steps=True),
                None if way == "shm" else self.ratio(way, transport="shm", both_steps=True),
            )
            total = np.median(self._seconds(way, self.rounds[way], both_steps=True))
            rows.append(
                [
                    way,
                    f"{Summary.of(publish).value * 1e3:.0f}" if publish else "",
                    f"{fetch.value * 1e3:.0f}",
                    f"{fetch.spread * 1e3:.0f}",
                    f"{self.case.nbytes / fetch.value / 1e9:.2f}",
                    *(f"{each.value:.2f} ({each.spread:.2f})" if each else "" for each in ratios),
                    f"{total * 1e3:.0f}",
                ]
            )
        return rows

    def stage_rows(self) -> list[list[str]]:
        """Return rows for a table with `STAGE_HEADINGS`."""
        return [
            [way, stage, f"{Summary.of(seconds).value * 1e3:.1f}"]
            for (way, stage), seconds in self.stages.items()
            if any(seconds)
        ]

    def entries(self) -> list[Entry]:
        """Return entries for the file of results."""
        size = "" if self.case.nbytes == QUICK_CASE.nbytes else f"_{self.case.nbytes >> 30}g"
        entries = []
        for way in self.fetch:
            fetch = Summary.of(self.fetch[way])
            rate = self.case.nbytes / fetch.value / 1e9
            name = f"refit.{way}_{self.case.name}{size}"
            entries.append(Entry(f"{name}.gb_per_s", rate, "GB/s", None, 0.0, fetch.count))
            entries.append(Entry.ms(f"{name}.fetch_ms", fetch))
            if self.publish[way]:
                entries.append(Entry.ms(f"{name}.publish_ms", Summary.of(self.publish[way])))
            for transport in ("nixl", "shm"):
                for suffix, both_steps in (("", False), ("_both_steps", True)):
                    ratio = self.ratio(way, transport=transport, both_steps=both_steps)
                    if way != transport and ratio is not None:
                        name = f"refit.{transport}_{self.case.name}{size}.ratio_vs_{way}{suffix}"
                        entries.append(Entry.of(name, ratio, "x", baseline=way))
        return entries


def _sized(nbytes: int, sources: int, targets: int) -> RefitCase:
    width = 2048
    return RefitCase(sources, targets, nbytes // (2 * 2 * 4 * width * width), width)


QUICK_CASE = _sized(1 << 29, 2, 4)


def measure_refit(announce: Callable[[str], None], *, full: bool) -> list[RefitResult]:
    """Run the cases, each with a separate Ray and control plane.

    Args:
        announce: called with the title of each part.
        full: whether to run every case; if False, only the small one.
    """
    if not full:
        announce("refits")
        return [_measure(QUICK_CASE, (_QUICK_WAYS,), _QUICK_ROUNDS)]
    results = []
    for nbytes in (1 << 29, 1 << 31):
        for sources, targets in _LAYOUTS:
            case = _sized(nbytes, sources, targets)
            announce(f"refits of {nbytes >> 20} MiB, {case.name}")
            # All ways' copies of 2 GiB together do not fit into 24 GiB of memory.
            large = nbytes > 1 << 30
            groups = (_MEMORY_WAYS, _PROCESS_WAYS, _FILE_WAYS) if large else (_WAYS,)
            results.append(_measure(case, groups, 5 if large else _FULL_ROUNDS))
    return results


def _measure(case: RefitCase, groups: Sequence[Sequence[str]], rounds: int) -> RefitResult:
    result = RefitResult(case)
    for group, ways in enumerate(groups):
        _measure_group(result, ways, range(group * rounds, (group + 1) * rounds))
    return result


def _measure_group(result: RefitResult, ways: Sequence[str], rounds: Sequence[int]) -> None:
    """Measure a group of ways, interleaved.

    Args:
        result: receives the measurements.
        ways: ways to run in each round, in shuffled order.
        rounds: numbers of the rounds, new to the result.
    """
    case = result.case
    order = random.Random(SEED)
    with _processes(case, "ray" in ways) as actors, _Ways(actors) as run:
        run.prepare(ways)
        for number in (*range(-_WARM_UPS, 0), *rounds):
            for way in order.sample(ways, len(ways)):
                publish, fetch = run.once(way)
                if number < 0:
                    continue
                result.rounds[way].append(number)
                if publish:
                    result.publish[way].append(total_seconds(publish))
                result.fetch[way].append(total_seconds(fetch))
                for stage in fetch[0].stages:
                    longest = max(timing.stages[stage] for timing in fetch)
                    result.stages[way, stage].append(longest)


@dataclass(frozen=True)
class _Actors:
    case: RefitCase
    sources: list[Any]
    targets: list[Any]


@contextmanager
def _processes(case: RefitCase, with_store: bool) -> Iterator[_Actors]:
    store_bytes = _OBJECT_STORE_BYTES if with_store else 100 << 20
    with temporary_ray(num_cpus=8, object_store_memory=store_bytes, namespace="benchmarks"):
        worker: Any = ray.remote(RefitWorker).options(num_cpus=0.1)
        actors = _Actors(
            case,
            [worker.remote(case, rank, source=True) for rank in range(case.sources)],
            [worker.remote(case, rank, source=False) for rank in range(case.targets_count)],
        )
        all_actors = [*actors.sources, *actors.targets]
        ray.get([actor.ready.remote() for actor in all_actors], timeout=_START_S)
        yield actors
        ray.get([actor.close.remote() for actor in all_actors], timeout=180)


class _Ways:
    """Runner of the ways on the actors."""

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
        """Prepare each way once, before anything is timed; check refit-mx's result."""
        sources, targets = self._actors.sources, self._actors.targets
        transports = [way for way in _REFIT_MX if way in ways]
        _all([*sources, *targets], "join", self._server.address, transports)
        for transport in transports:
            version = self._version()
            _all(sources, "publish", version)
            _all(targets, "check", version, transport)
        if "raw_nixl" in ways:
            buffers = _all(sources, "register_raw")
            _all(targets, "prepare_raw", buffers)
        if "gloo" in ways:
            # A file, because a free port may be taken before gloo binds it.
            init_method = f"file://{self._folder.name}/gloo"
            all_actors = [*sources, *targets]
            ray.get(
                [
                    actor.join_gloo.remote(init_method, rank, len(all_actors))
                    for rank, actor in enumerate(all_actors)
                ],
                timeout=_START_S,
            )

    def once(self, way: str) -> tuple[list[Timing], list[Timing]]:
        """Run a way once; return the timings of the trainers and of the generators."""
        sources, targets = self._actors.sources, self._actors.targets
        if way in _REFIT_MX:
            version = self._version()
            publish = _all(sources, "publish", version)
            return publish, _all(targets, "receive", version, way)
        if way in ("raw_nixl", "raw_nixl_long"):
            return [], _all(targets, "read_raw", way == "raw_nixl_long")
        if way == "gloo":
            return [], _all([*sources, *targets], "broadcast")
        if way == "ray":
            puts = _all(sources, "put_ray")
            references = [references for _, references in puts]
            return [timing for timing, _ in puts], _all(targets, "get_ray", references)
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
    results: list[Any] = ray.get(
        [getattr(actor, method).remote(*args) for actor in actors], timeout=_START_S
    )
    return results
