"""What the service would answer about the made-up run.

Traces are put together by the service's own code out of the made-up spans; the rest are models.
"""

from made_up_traces import (
    FIELDS,
    HOSTILE,
    HOSTILE_PARTITION,
    NOW_NS,
    REVERSED,
    RUN,
    STEPS,
    TASKS,
    MadeUpStore,
    trace_id_of,
)

from dataplane_admin.answers import NotFound, Refused, Unavailable, models
from dataplane_admin.answers import run_steps as steps_of_run
from dataplane_admin.answers import traces as put_together


class MadeUpAnswers:
    """`Answers` about the run. ``tick`` moves the live part on; ``empty`` knows nothing."""

    def __init__(self, settings, *, empty=False):
        self.settings = settings
        self.empty = empty
        self.store = MadeUpStore() if not empty else None
        self.tick = 0
        self.done = []
        self.unavailable = False

    def status(self):
        live = models.LiveStatus(
            asked=not self.empty,
            attached=not self.empty and not self.unavailable,
            source="" if self.empty else "Ray at 10.0.0.1:6379",
            error="Ray at 10.0.0.1:6379 did not answer within 5 s." if self.unavailable else None,
            at_ns=NOW_NS,
            age_s=0.4,
            revision=self.tick,
        )
        store = models.StoreStatus(
            writable=True,
            error=None,
            revision=self.tick,
            traces=0 if self.empty else 1_204,
            spans=0 if self.empty else 118_000,
            events=0 if self.empty else 1_012_440,
            samples=0 if self.empty else 20_480,
            nbytes=0 if self.empty else 412_000_000,
            oldest_ns=None,
        )
        telemetry = models.TelemetryStatus(
            ingested={"spans": 118_000}, refused=0 if self.empty else 7, repeated=0, ignored=0
        )
        return models.Status(
            name="dataplane-admin",
            version="0.1.0",
            now_ns=NOW_NS + 900_000_000,
            started_ns=NOW_NS - 10**12,
            live=live,
            store=store,
            telemetry=telemetry,
            actions=self.settings.allow_actions,
            subscribers=1,
        )

    def _task(self, name, there, settled, leased, needs, ready, age):
        claim = None
        if leased:
            claim = models.Claim(
                claim=f"{name}-7f3a",
                task=name,
                owner="node-2:4011",
                samples=leased,
                age_s=12.4,
                expires_in_s=47.6,
            )
        unclaimed = there - settled - leased
        rising = [
            max(0, round(unclaimed * (1 - 0.9 ** (i + 1)) + 9 * ((i * 7) % 5))) for i in range(60)
        ]
        return models.PartitionTask(
            name=name,
            unclaimed=unclaimed,
            assigned=0,
            leased=leased,
            settled=settled,
            leases=1 if leased else 0,
            needs=needs,
            ready=ready,
            oldest_unclaimed_s=age,
            oldest_claim=claim,
            claimed_per_s=21.0,
            settled_per_s=19.4,
            backlog_per_s=4.2 if unclaimed else -0.01,
            backlog=[*rising[:-1], unclaimed],
        )

    def _partition(self, name, declared, put, tasks, scale):
        polled = [NOW_NS - (60 - i) * 10**9 for i in range(60)]
        kinds = [
            "jagged int64",
            "jagged bool",
            "jagged float32",
            "float32",
            "jagged float32",
            None,
            None,
        ]
        fields = [
            models.PartitionField(
                name=field,
                kind=kinds[i] if i < 5 else None,
                declared=True,
                written=(put, put, put, put, put * 3 // 4 + self.tick, put // 2, 0)[i],
                nbytes=None if i > 5 else (scale * put // (i + 1)),
            )
            for i, field in enumerate(FIELDS)
        ]
        return models.Partition(
            id=name,
            declared=declared,
            put=put,
            present=put,
            outstanding=declared - put,
            reserved=0,
            cleared=0,
            group_size=8,
            nbytes=scale * put * 2,
            revision=self.tick,
            fields=fields,
            tasks=tasks,
            enums={},
            put_per_s=24.6,
            polled_ns=polled,
            put_trend=[put * i // 60 for i in range(60)],
        )

    def partitions(self):
        if self.empty:
            return models.Partitions(partitions=[], storage=[], totals={}, live=self.status().live)
        partitions = [
            self._partition(
                "train",
                512,
                480,
                [
                    self._task(
                        "logprob",
                        480,
                        344 + self.tick,
                        32,
                        ["input_ids", "token_mask"],
                        104 - self.tick,
                        3.1,
                    ),
                    self._task("reference", 480, 240, 0, ["input_ids", "token_mask"], 240, 9.8),
                    self._task("train", 480, 0, 0, ["input_ids", "advantages"], 0, 71.3),
                ],
                33_000,
            ),
            self._partition(
                "replay-100k",
                100_000,
                100_000,
                [
                    self._task(
                        "train", 100_000, 61_440, 2_048, ["input_ids", "advantages"], 22_000, 640.0
                    ),
                ],
                5_200,
            ),
            self._partition(HOSTILE_PARTITION, 16, 0, [], 0),
        ]
        units = [
            models.Unit(
                name=f"unit-{i}",
                node=f"10.0.0.{i + 1}",
                capacity=64_000_000_000,
                used=used,
                free=64_000_000_000 - used,
            )
            for i, used in enumerate((21_400_000_000, 39_800_000_000, 60_100_000_000, 9_000_000))
        ]
        return models.Partitions(
            partitions=partitions,
            storage=units,
            totals={"samples_put": 20_480},
            live=self.status().live,
        )

    def partition(self, partition_id):
        for one in self.partitions().partitions:
            if one.id == partition_id:
                return one
        raise NotFound(f"partition '{partition_id}' is not there; known are train, replay-100k")

    def partition_matrix(self, partition_id, *, windows=120):
        facts = self.partition(partition_id)
        total = facts.present
        wide = max(1, -(-total // windows))
        found = []
        for start in range(0, total, wide):
            at = start / total
            written = [
                min(1.0, field.written / total)
                if field.written in (0, total)
                else min(
                    1.0,
                    max(
                        0.0,
                        (field.written / total - at) * 6
                        + 0.5
                        + 0.2 * ((start // wide * 7) % 5 - 2) / 5,
                    ),
                )
                for field in facts.fields
            ]
            tasks = []
            for task in facts.tasks:
                settled = min(
                    1.0, max(0.0, (task.settled / total - at) * 8 + 0.1 * ((start // wide) % 3))
                )
                leased = (
                    min(1 - settled, 0.6)
                    if settled < 1 and at < (task.settled + 3 * task.leased) / total
                    else 0.0
                )
                tasks.append([1 - settled - leased, 0.0, leased, settled])
            found.append(
                models.Window(
                    start=start, count=min(wide, total - start), written=written, tasks=tasks
                )
            )
        return models.Matrix(
            partition=partition_id,
            total=total,
            scanned=total,
            at_ns=NOW_NS,
            fields=FIELDS,
            tasks=[task.name for task in facts.tasks],
            windows=found,
        )

    def _sample(self, partition_id, place):
        names = FIELDS[: 4 + (place % 3)]
        return models.Sample(
            sample_id=HOSTILE
            if place == 3
            else REVERSED
            if place == 4
            else f"s39_p{place // 8}_g{place % 8}",
            partition=partition_id,
            fields=names,
            tags={"prompt_id": place // 8, "reward": place % 2 == 0},
            tasks={
                task: ("settled", "leased", "unclaimed")[min(2, place // 9 + i)]
                for i, task in enumerate(TASKS)
            },
            claims={},
            age_s=12.5 + place,
            origins={},
        )

    def partition_samples(self, partition_id, *, start=0, limit=100):
        if self.unavailable:
            raise Unavailable("the data plane did not answer within 5 s")
        total = self.partition(partition_id).present
        places = range(start, min(start + limit, total))
        return models.SamplePage(
            partition=partition_id,
            start=start,
            total=total,
            samples=[self._sample(partition_id, one) for one in places],
        )

    def partition_view(self, partition_id, *, start=0, limit=100, windows=120):
        facts = self.partition(partition_id)
        empty = models.SamplePage(partition=partition_id, start=start, total=0, samples=[])
        problem = "the data plane did not answer within 5 s" if self.unavailable else ""
        return models.PartitionView(
            at_ns=NOW_NS,
            spread_s=0.0,
            partition=facts,
            matrix=self.partition_matrix(partition_id, windows=windows),
            samples=empty
            if problem
            else self.partition_samples(partition_id, start=start, limit=limit),
            claims=[] if problem else self.partition_claims(partition_id),
            problem=problem,
        )

    def partition_claims(self, partition_id):
        self.partition(partition_id)
        return [
            models.Claim(
                claim="logprob-7f3a",
                task="logprob",
                owner="node-2:4011",
                samples=32,
                age_s=12.4,
                expires_in_s=47.6,
            ),
            models.Claim(
                claim="train-01bc",
                task="train",
                owner="node-2:4013",
                samples=8,
                age_s=640,
                expires_in_s=-20.5,
            ),
        ]

    def samples(self, q="", *, tag=None, value=None, partition=None, cursor=None, limit=50):
        if cursor == "wrong":
            raise Refused("the cursor is none of this service's")
        hits = [
            models.SampleHit(
                sample_id=one,
                partition="train",
                run_id=RUN,
                weight_version=38,
                first_ns=NOW_NS - 9 * 10**9,
                last_ns=NOW_NS - 10**9,
                live=True,
            )
            for one in [HOSTILE, REVERSED, *(f"s39_p{i // 8}_g{i % 8}" for i in range(40))]
            if one.startswith(q)
        ]
        return models.SampleHits(
            samples=hits[:limit], next="more" if len(hits) > 20 and not cursor else None, notes=[]
        )

    def sample(self, sample_id, *, partition=None):
        if sample_id == "nobody":
            raise NotFound(
                "no event names the sample 'nobody', and the data plane does not have it"
            )
        start = NOW_NS - 62 * 10**9
        hops = []
        for at, name, process, task, stage, fields, detail in (
            (0, "put", "grpo.rollout", "", "rollout", FIELDS[:4], ""),
            (
                0.31,
                "claimed",
                "grpo.policy 1",
                "logprob",
                "logprobs",
                ["input_ids", "token_mask"],
                "waited 0.21 s",
            ),
            (0.33, "read", "grpo.policy 1", "", "logprobs", ["input_ids", "token_mask"], ""),
            (0.52, "put", "grpo.policy 1", "", "logprobs", ["logprobs"], ""),
            (0.53, "acknowledged", "grpo.policy 1", "logprob", "logprobs", [], ""),
            (0.81, "put", "grpo.policy 3", "", "reference", ["reference_logprobs"], ""),
            (0.93, "put", "grpo.driver", "", "advantages", ["advantages"], ""),
            (31.2, "claimed", "grpo.policy 0", "train", "train", FIELDS, "waited 8.71 s"),
            (31.3, "read", "grpo.policy 0", "", "train", FIELDS, ""),
            (34.1, "trained", "grpo.policy 0", "train", "train", [], ""),
            (34.2, "acknowledged", "grpo.policy 0", "train", "train", [], ""),
            (35.0, "cleared", "grpo.driver", "", "clear", [], ""),
        ):
            version = 38 if at < 1 else 40
            span = self.store.held[trace_id_of(38)].spans[9]
            hops.append(
                models.Hop(
                    time_ns=start + int(at * 1e9),
                    seconds=at,
                    name=name,
                    process=process,
                    partition="train",
                    task=task,
                    stage=stage,
                    fields=fields,
                    nbytes=41_200.0 if name in ("put", "read") else None,
                    batch=128,
                    weight_version=version,
                    run_id=RUN,
                    step=38,
                    trace_id=trace_id_of(38),
                    span_id=span.span_id,
                    detail=detail,
                    whole_partition=name == "cleared",
                )
            )
        live = self._sample("train", 11) if sample_id != "gone" else None
        return models.SampleLife(
            sample_id=sample_id, partition=partition, hops=hops, live=live, notes=[]
        )

    def why(self, *, run=None):
        return [one for one in self._waits() if run in (None, one.run_id)]

    def _waits(self):
        if self.empty:
            return []
        return [
            models.Wait(
                kind="wait",
                sentence=(
                    "task 'train' in grpo.policy 1 has waited 71.3 s for 128 samples of partition "
                    "'train' with input_ids, advantages: 3 of 480 lack advantages (s39_p0_g0, "
                    "s39_p0_g1, …); 125 are ready; 32 are still to be put"
                ),
                task="train",
                process="grpo.policy 1",
                partition="train",
                run_id=RUN,
                step=39,
                since_ns=NOW_NS - 71 * 10**9,
                seconds=71.3 + self.tick,
                silent_s=None,
                asked=128,
                ready=125,
                there=480,
                lacks={"advantages": models.Lack(count=3, examples=["s39_p0_g0", "s39_p0_g1"])},
                blocking=["s39_p0_g0", "s39_p0_g1", HOSTILE, REVERSED, "s39_p0_g5"],
                claim="",
            ),
            models.Wait(
                kind="claim",
                sentence=f"task 'train' holds 8 samples of partition '{HOSTILE}' since 640 s, "
                "and its lease expired 20.5 s ago",
                task="train",
                process="node-2:4013",
                partition="replay-100k",
                run_id="",
                step=None,
                since_ns=NOW_NS - 640 * 10**9,
                seconds=640.0,
                silent_s=None,
                asked=0,
                ready=0,
                there=100_000,
                lacks={},
                blocking=[],
                claim="train-01bc",
            ),
            models.Wait(
                kind="wait",
                sentence="task 'train' in grpo.policy 0 has waited 2 h for 128 samples of "
                "partition 'old': the partition is not there; nothing has been heard of it for 1 h",
                task="train",
                process="grpo.policy 0",
                partition="old",
                run_id="yesterday",
                step=7,
                since_ns=NOW_NS - 7_200 * 10**9,
                seconds=7_200.0,
                silent_s=3_600.0,
                asked=128,
                ready=0,
                there=0,
                lacks={},
                blocking=[],
                claim="",
            ),
        ]

    def staleness(self, *, run=None, steps=20):
        counts = {} if self.empty else {0: 310, 1: 1_420, 2: 611, 3: 122, 4: 31, 7: 2}
        total = sum(counts.values())
        mean = sum(version * count for version, count in counts.items()) / total if total else None
        return models.Staleness(
            run_id="" if self.empty else RUN,
            steps=steps,
            left_out=0 if self.empty else 3,
            counts=counts,
            mean=mean,
            unknown=0 if self.empty else 12,
        )

    def run_steps(self, *, run=None, ranges=10):
        return self.run_steps_cut(ranges, run=run)[0]

    def run_steps_cut(self, *ranges, run=None):
        if self.empty:
            return [models.RunSteps(run_id="", steps=0, older=False, ranges=[]) for _ in ranges]
        return steps_of_run.run_steps(self.store, RUN if run is None else run, *ranges)

    def runs(self):
        if self.empty:
            return models.Runs(runs=[])
        names = [RUN, "grpo-math/20261120-0930", HOSTILE]
        return models.Runs(
            runs=[
                models.Run(run_id=one, first_ns=NOW_NS - 10**11, last_ns=NOW_NS, steps=STEPS)
                for one in names
            ]
        )

    def traces(
        self,
        *,
        run=None,
        step=None,
        min_s=None,
        max_s=None,
        error=None,
        name=None,
        cursor=None,
        limit=50,
    ):
        rows = [] if self.empty else list(reversed(self.store.rows.values()))
        rows = [
            row
            for row in rows
            if (not run or row.run_id == run)
            and (step is None or row.step == step)
            and (min_s is None or row.seconds >= min_s)
            and (max_s is None or row.seconds <= max_s)
            and (not error or row.errors)
            and (not name or name in row.name)
        ]
        begin = int(cursor or 0)
        limit = min(limit, 25)
        page = rows[begin : begin + limit]
        following = str(begin + limit) if begin + limit < len(rows) else None
        return models.Traces(
            traces=[models.TraceFacts(**put_together.facts(row)) for row in page], next=following
        )

    def steps(self, run, *, limit=10):
        return self.traces(run=run, limit=limit).traces if run == RUN else []

    def trace(self, trace_id):
        return put_together.trace(self.store, self.settings, trace_id)

    def trace_compare(self, a, b):
        return put_together.compare(self.store, a, b)

    def audit(self, *, cursor=None, limit=50):
        entries = (
            []
            if self.empty
            else [
                models.AuditEntry(
                    id=3,
                    time_ns=NOW_NS - 4 * 10**9,
                    actor="session 3f2b8c0d from 127.0.0.1",
                    action="end-claim",
                    target="replay-100k",
                    parameters={"claim": "train-01bc"},
                    outcome="done: 8 samples can be claimed again",
                ),
                models.AuditEntry(
                    id=2,
                    time_ns=NOW_NS - 900 * 10**9,
                    actor="anybody from 127.0.0.1",
                    action="clear",
                    target=HOSTILE_PARTITION,
                    parameters={"samples": [HOSTILE], "force": False},
                    outcome="failed: 3 samples are leased by task 'train'",
                ),
                models.AuditEntry(
                    id=1,
                    time_ns=NOW_NS - 90_000 * 10**9,
                    actor="token from 10.0.0.9",
                    action="reset-consumption",
                    target="train",
                    parameters={"task": "logprob", "samples": 12},
                    outcome="done: 12 samples can be claimed again",
                ),
            ]
        )
        return models.Audit(entries=entries, next=None)

    def _acted(self, action, asked, actor):
        self.done.append((action, asked, actor))
        return models.ActionResult(
            action=action,
            partition=asked.partition,
            samples=2,
            sentence=f"2 samples of partition '{asked.partition}' were changed.",
        )

    def clear(self, asked, *, actor):
        return self._acted("clear", asked, actor)

    def reset_consumption(self, asked, *, actor):
        return self._acted("reset-consumption", asked, actor)

    def end_claim(self, asked, *, actor):
        return self._acted("end-claim", asked, actor)
