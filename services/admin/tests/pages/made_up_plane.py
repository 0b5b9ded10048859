"""A data plane in the state of a long run: ages of minutes, and a partition of 100,000 samples."""

import numpy as np
from made_up_traces import FIELDS, HOSTILE_PARTITION, STEPS, TASKS, sample_id

from dataplane_core import (
    ClaimSummary,
    FieldSummary,
    PartitionNotFoundError,
    PartitionSummary,
    SampleState,
    StatePage,
    StorageSummary,
    TaskSummary,
    UnavailableError,
)

KINDS = ["jagged int64", "jagged bool", "jagged float32", "float32", "jagged float32"]
NEEDS = ["input_ids", "advantages"]
CLAIMS = [
    ClaimSummary(
        claim="train-01bc",
        task="train",
        owner="node-2:4013",
        samples=8,
        age_s=640.0,
        expires_in_s=-20.5,
    ),
    ClaimSummary(
        claim="logprob-7f3a",
        task="logprob",
        owner="node-2:4011",
        samples=32,
        age_s=12.4,
        expires_in_s=47.6,
    ),
]
STATES = ("unclaimed", "assigned", "leased", "acknowledged")


def task(name, present, acknowledged, leased, age_s, claim=None):
    return TaskSummary(
        name=name,
        unclaimed=present - acknowledged - leased,
        leased=leased,
        acknowledged=acknowledged,
        leases=leased > 0,
        oldest_unclaimed_s=age_s,
        oldest_claim=claim,
    )


class MadeUpPlane:
    """A `StoreInspector` of made-up partitions.

    ``tick`` advances it, ``more`` has further partitions, and ``is_away`` fails all calls.
    """

    def __init__(self):
        self.tick = 0
        self.more = []
        self.is_away = False
        self.done = []

    def _partition(self, name, declared, present, written, tasks, scale):
        return PartitionSummary(
            partition_id=name,
            declared=declared,
            put=present,
            present=present,
            reserved=0,
            group_size=8,
            fields=tuple(
                FieldSummary(
                    name=field,
                    kind=KINDS[place] if place < len(KINDS) else None,
                    declared=True,
                    written=count,
                    nbytes=scale * count // (place + 1),
                )
                for place, (field, count) in enumerate(zip(FIELDS, written, strict=True))
            ),
            tasks=tuple(tasks),
            nbytes=scale * present * 2,
            revision=1 + self.tick,
        )

    def list_partitions(self):
        if self.is_away:
            raise UnavailableError("the data plane did not answer within 5 s")
        return [
            self._partition(
                "train",
                512,
                480,
                [480, 480, 480, 480, 360 + self.tick, 240, 477],
                [
                    task("logprob", 480, 344 + self.tick, 32, 3.1, CLAIMS[1]),
                    task("reference", 480, 240, 0, 9.8),
                    task("train", 480, 0, 0, 71.3),
                ],
                33_000,
            ),
            self._partition(
                "replay-100k",
                100_000,
                100_000,
                [100_000] * 4 + [75_000, 50_000, 0],
                [task("train", 100_000, 61_440, 2_048, 10.0, CLAIMS[0])],
                5_200,
            ),
            self._partition(HOSTILE_PARTITION, 16, 0, [0] * len(FIELDS), [], 0),
            *(
                self._partition(name, 8, 8, [8] * len(FIELDS), [task("train", 8, 4, 0, 1.0)], 10)
                for name in self.more
            ),
        ]

    def _find(self, partition_id):
        for summary in self.list_partitions():
            if summary.partition_id == partition_id:
                return summary
        raise PartitionNotFoundError(f"partition {partition_id!r} is not registered")

    def list_storage(self):
        gib = 1 << 30
        return [
            StorageSummary(
                name=f"unit-{i}",
                node=f"10.0.0.{i}",
                capacity=4 * gib,
                used=i * gib,
                free=(4 - i) * gib,
            )
            for i in (1, 2)
        ] + [
            StorageSummary(
                name=f"unit-{HOSTILE_PARTITION}-{limit}",
                node="10.0.0.3",
                capacity=None,
                used=gib,
                free=None,
                samples=1_200,
                max_samples=limit,
            )
            for limit in (4_000, None)
        ]

    def read_totals(self):
        return {"puts": 12}

    def list_claims(self, partition_id):
        self._find(partition_id)
        return CLAIMS

    def list_assignments(self, partition_id):
        return []

    def _state(self, place):
        return SampleState(
            sample_id=sample_id(STEPS - 1, place),
            fields=tuple(FIELDS[: 4 + place % 3]),
            tags={"prompt_id": place // 8, "reward": place % 2 == 0},
            tasks={
                name: ("acknowledged", "leased", "unclaimed")[min(2, place // 9 + number)]
                for number, name in enumerate(TASKS)
            },
            origins={},
            age_s=12.5 + place,
        )

    def list_samples(self, partition_id, *, start=0, limit=100):
        present = self._find(partition_id).present
        return [self._state(place) for place in range(start, min(start + limit, present))]

    def read_sample(self, partition_id, sample_id):
        states = [
            state for state in self.list_samples(partition_id) if state.sample_id == sample_id
        ]
        return states[0] if states else None

    def find_samples(self, partition_id, *, tag, value, limit=100):
        states = self.list_samples(partition_id)
        return [state for state in states if state.tags.get(tag) == value][:limit]

    def scan_states(self, partition_id, *, start=0, limit=10_000):
        """Return states in which fields and tasks progress from the front, with a ragged edge."""
        summary = self._find(partition_id)
        places = np.arange(start, min(start + limit, summary.present))
        ragged = places + 97 * (places // 60 % 5)
        written = [ragged < held.written for held in summary.fields]
        states = [
            np.where(
                ragged < task.acknowledged,
                3,
                np.where(ragged < task.acknowledged + task.leased, 2, 0),
            )
            for task in summary.tasks
        ]
        columns = [
            np.array(held, np.uint8).reshape(len(held), len(places)) for held in (written, states)
        ]
        return StatePage(
            total=summary.present,
            start=start,
            fields=tuple(held.name for held in summary.fields),
            tasks=tuple(task.name for task in summary.tasks),
            written=columns[0].T.tobytes(),
            states=columns[1].T.tobytes(),
        )

    def clear_samples(self, sample_ids, partition_id, *, force=False):
        self.done.append(("clear", partition_id, sample_ids, force))

    def reset_consumption(self, partition_id, task_name, sample_ids):
        self.done.append(("redeliver", partition_id, task_name, sample_ids))
        return len(sample_ids)

    def end_claim(self, partition_id, claim, *, expired_only=True):
        self.done.append(("end-claim", partition_id, claim, expired_only))
        return 8
