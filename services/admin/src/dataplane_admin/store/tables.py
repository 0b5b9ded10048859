"""Tables, the same for SQLite and PostgreSQL.

Change a table here and add a migration in `migrations/versions` for existing databases.

A database may reject untrusted text or index it badly. So ids of traces, spans and samples are
bytes, and names are stored in the form of `texts.storable`. The writer draws keys (`id`, `key`)
from ``state.last_id``: they grow with every record and are never reused.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Text,
    literal_column,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, column_property, mapped_column

# SQLite keeps a table in the order of its key only if the key is declared INTEGER.
Key = BigInteger().with_variant(Integer(), "sqlite")


class Base(DeclarativeBase):
    """Base of all tables, with names of constraints that are the same in every database."""

    metadata = MetaData(
        naming_convention={
            "pk": "pk_%(table_name)s",
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012  # what SQLAlchemy expects
        int: BigInteger,
        str: Text,
        bytes: LargeBinary,
        bool: Boolean,
        float: Double,
    }


class StateRow(Base):
    """The single row of counters, updated with each change because counting rows is slow."""

    __tablename__ = "state"

    id: Mapped[int] = mapped_column(Key, primary_key=True, autoincrement=False)
    revision: Mapped[int]
    last_id: Mapped[int]
    traces: Mapped[int]
    spans: Mapped[int]
    events: Mapped[int]
    samples: Mapped[int]
    nbytes: Mapped[int]


class RunModel(Base):
    """A run, stored with its first record. Times are nanoseconds since 1970.

    ``state`` is ``running``, ``finished``, ``stopped`` or ``failed``, reported at ``state_ns``;
    empty if the run reported neither start nor end. ``config``, an object of texts as JSON, and
    ``resumed_from`` were reported by its last start at ``started_ns``. ``tags`` is a JSON list.
    """

    __tablename__ = "runs"

    run_id: Mapped[str] = mapped_column(primary_key=True)
    first_ns: Mapped[int]
    last_ns: Mapped[int]
    updated_ns: Mapped[int]
    state: Mapped[str] = mapped_column(server_default="")
    state_ns: Mapped[int] = mapped_column(server_default="0")
    error: Mapped[str] = mapped_column(server_default="")
    started_ns: Mapped[int] = mapped_column(server_default="0")
    resumed_from: Mapped[int | None]
    config: Mapped[str] = mapped_column(server_default="{}")
    tags: Mapped[str] = mapped_column(server_default="[]")


class TraceModel(Base):
    """A trace, as lists of traces show it.

    ``start_ns`` and ``end_ns`` are 0 if no span reported a time. ``arrival`` grows in order of
    arrival, independent of senders' clocks. ``process_digests`` has eight bytes of each process,
    ``service_names`` at most 16 names, see `texts.lines_of`; ``nbytes`` the approximate bytes of
    its chunks and rows.
    """

    __tablename__ = "traces"
    __table_args__ = (
        Index(None, "arrival"),
        Index(None, "run_id", "arrival"),
        Index(None, "run_id", "step"),
        Index(None, "updated_ns"),
    )

    trace_id: Mapped[bytes] = mapped_column(primary_key=True)
    run_id: Mapped[str]
    step: Mapped[int | None]
    name: Mapped[str]
    start_ns: Mapped[int]
    end_ns: Mapped[int]
    has_root: Mapped[bool]
    spans: Mapped[int]
    errors: Mapped[int]
    processes: Mapped[int]
    process_digests: Mapped[bytes]
    service_names: Mapped[str]
    rejected: Mapped[int]
    nbytes: Mapped[int]
    updated_ns: Mapped[int]
    arrival: Mapped[int]


class ChunkModel(Base):
    """The spans of one trace in one request: ``blob`` is an OTLP TracesData, see `compressed`."""

    __tablename__ = "span_chunks"
    __table_args__ = (Index(None, "trace_id", "digest", unique=True),)

    id: Mapped[int] = mapped_column(Key, primary_key=True, autoincrement=False)
    trace_id: Mapped[bytes]
    digest: Mapped[bytes]
    spans: Mapped[int]
    received_ns: Mapped[int]
    blob: Mapped[bytes]


class SpanModel(Base):
    """A received span; repetitions share one row.

    ``trace`` is the ``arrival`` of its trace, ``span`` its `chunk.span_key` and ``state`` its
    `chunk.span_state`: integers, because there are many rows.
    """

    __tablename__ = "spans"
    __table_args__ = ({"sqlite_with_rowid": False},)

    trace: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    span: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    state: Mapped[int]


class LinkModel(Base):
    """A link from one trace to another."""

    __tablename__ = "trace_links"
    __table_args__ = (
        Index(None, "linked_id", "trace_id"),
        {"sqlite_with_rowid": False},
    )

    trace_id: Mapped[bytes] = mapped_column(primary_key=True)
    linked_id: Mapped[bytes] = mapped_column(primary_key=True)


class PlaceModel(Base):
    """A partition of a run; events without a partition belong to the empty one.

    ``cleared_ns`` is the last clear of the entire partition, 0 if there was none.
    """

    __tablename__ = "places"
    __table_args__ = (Index(None, "run_id", "partition", unique=True),)

    id: Mapped[int] = mapped_column(Key, primary_key=True, autoincrement=False)
    run_id: Mapped[str]
    partition: Mapped[str]
    cleared_ns: Mapped[int]


class EventModel(Base):
    """A lifecycle event: ``record`` is OTLP LogsData without the ids, ``keys`` are the samples.

    ``record`` is compressed, see `compressed`, and ``keys`` are packed, see `packed`. ``wait`` is a
    digest that start and end of a wait share.
    """

    __tablename__ = "events"
    __table_args__ = (
        Index(None, "digest", unique=True),
        Index(None, "place_id", "name", "step"),
        Index(None, "place_id", "time_ns"),
        Index(None, "trace_id"),
        Index(None, "wait"),
    )

    id: Mapped[int] = mapped_column(Key, primary_key=True, autoincrement=False)
    place_id: Mapped[int]
    name: Mapped[str]
    step: Mapped[int | None]
    time_ns: Mapped[int]
    received_ns: Mapped[int]
    task: Mapped[str]
    samples: Mapped[int]
    weight_version: Mapped[int | None]
    trace_id: Mapped[bytes | None]
    span_id: Mapped[bytes | None]
    wait: Mapped[bytes | None]
    digest: Mapped[bytes]
    record: Mapped[bytes]
    keys: Mapped[bytes]


class SampleStemModel(Base):
    """The first bytes of long sample ids, often shared by a group's ids; empty for short ids."""

    __tablename__ = "sample_stems"
    __table_args__ = (Index(None, "stem", unique=True),)

    id: Mapped[int] = mapped_column(Key, primary_key=True, autoincrement=False)
    stem: Mapped[bytes]


class SampleModel(Base):
    """A sample of a place. Its id is the stem of its `SampleStemModel`, ``head`` and ``tail``.

    See `texts.split_id`. ``put_ns`` is the first put of its newest life, cleared or not (see
    `lives`), and ``weight_version`` the version of the weights that generated it. ``gone_ns`` is
    its latest clear by id; ``live_ns`` is its latest put, 0 if that clear came later. Unset times
    are 0. ``before_ns`` and ``after_ns`` store the first and last event as differences, which are
    mostly 0 and take no space.
    """

    __tablename__ = "samples"
    __table_args__ = (
        Index(None, "stem_id", "head"),
        # Databases use this index only for queries with `IS_LIVE`.
        Index(
            None,
            "place_id",
            "live_ns",
            sqlite_where=text("live_ns > 0"),
            postgresql_where=text("live_ns > 0"),
        ),
    )

    key: Mapped[int] = mapped_column(Key, primary_key=True, autoincrement=False)
    place_id: Mapped[int]
    stem_id: Mapped[int]
    head: Mapped[bytes]
    tail: Mapped[bytes]
    weight_version: Mapped[int | None]
    put_ns: Mapped[int] = mapped_column()
    live_ns: Mapped[int]
    gone_ns: Mapped[int] = mapped_column()
    before_ns: Mapped[int] = mapped_column()
    after_ns: Mapped[int] = mapped_column()
    first_ns: Mapped[int] = column_property((put_ns - before_ns).label("first_ns"))
    last_ns: Mapped[int] = column_property((gone_ns + after_ns).label("last_ns"))


IS_LIVE = SampleModel.live_ns > literal_column("0")
"""Condition of the index of live samples. With a parameter, the planner would not use the index."""


class EventSampleModel(Base):
    """Samples named by an event: a block of keys and its members, see `packed.pack_blocks`."""

    __tablename__ = "event_samples"
    __table_args__ = ({"sqlite_with_rowid": False},)

    block: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    event_id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    members: Mapped[int]


class LogModel(Base):
    """A log record of a trace: ``record`` is OTLP LogsData, see `compressed`."""

    __tablename__ = "trace_logs"
    __table_args__ = (Index(None, "trace_id", "digest", unique=True),)

    id: Mapped[int] = mapped_column(Key, primary_key=True, autoincrement=False)
    trace_id: Mapped[bytes]
    digest: Mapped[bytes]
    received_ns: Mapped[int]
    record: Mapped[bytes]


class SampleGroupModel(Base):
    """A group of samples of a run; samples without a group belong to the empty one.

    Without this table, the row of each sample would repeat the names of run and group.
    """

    __tablename__ = "sample_groups"
    __table_args__ = (Index(None, "group_id", "run_id", unique=True),)

    id: Mapped[int] = mapped_column(Key, primary_key=True, autoincrement=False)
    run_id: Mapped[str]
    group_id: Mapped[str]


class SampleFactModel(Base):
    """Facts of a sample, see `batch.SampleFacts`; ``digest`` is that of run and sample id.

    ``time_ns`` is the time of the newest facts, ``state_ns`` that of the state; ``id`` grows in
    the order of first arrivals. ``group_key`` is the id of its `SampleGroupModel`, and
    ``sample`` the id within the group, see `texts.shortened`. ``tags`` are lines ``name=value``,
    see `texts.lines_of`.
    """

    __tablename__ = "sample_facts"
    __table_args__ = (
        Index(None, "digest", unique=True),
        Index(None, "group_key"),
        Index(None, "reward", "id"),
    )

    id: Mapped[int] = mapped_column(Key, primary_key=True, autoincrement=False)
    digest: Mapped[int]
    group_key: Mapped[int]
    sample: Mapped[bytes]
    step: Mapped[int | None]
    reward: Mapped[float | None]
    advantage: Mapped[float | None]
    length: Mapped[int | None]
    truncated: Mapped[bool | None]
    first_version: Mapped[int | None]
    last_version: Mapped[int | None]
    state: Mapped[str]
    state_ns: Mapped[int]
    time_ns: Mapped[int]
    received_ns: Mapped[int]
    tags: Mapped[str]


class SampleTextModel(Base):
    """Turns and tokens of a sample, JSON compressed by zlib; ``id`` is that of its facts."""

    __tablename__ = "sample_texts"
    __table_args__ = (Index(None, "received_ns"),)

    id: Mapped[int] = mapped_column(Key, primary_key=True, autoincrement=False)
    received_ns: Mapped[int]
    blob: Mapped[bytes]


class OpenWaitModel(Base):
    """An open wait; ``process_id`` is the identity of the blocked process.

    ``is_periodic`` is True if the process reports the wait repeatedly while it lasts.
    """

    __tablename__ = "open_waits"
    __table_args__ = (Index(None, "wait"),)

    event_id: Mapped[int] = mapped_column(Key, primary_key=True, autoincrement=False)
    wait: Mapped[bytes]
    place_id: Mapped[int]
    process: Mapped[str]
    process_id: Mapped[bytes]
    is_periodic: Mapped[bool]


class SeriesModel(Base):
    """A metric series, aggregated: ``value``, or ``histogram`` as JSON.

    ``run_id`` is that of the newest point, empty if not reported; ``sums`` is `series_sums.Sums` as
    JSON; ``points`` has eight bytes of each of the last points, to recognize resent ones.
    """

    __tablename__ = "series"
    __table_args__ = (Index(None, "name"), Index(None, "updated_ns"))

    digest: Mapped[bytes] = mapped_column(primary_key=True)
    process: Mapped[str]
    name: Mapped[str]
    unit: Mapped[str]
    attributes: Mapped[str]
    value: Mapped[float | None]
    histogram: Mapped[str | None]
    time_ns: Mapped[int]
    updated_ns: Mapped[int]
    process_id: Mapped[bytes]
    scope: Mapped[str]
    run_id: Mapped[str]
    sums: Mapped[str]
    points: Mapped[bytes]


class CurveModel(Base):
    """A metric of a run over its steps, for one set of attributes, which are JSON.

    ``digest`` is that of run, name and attributes; ``points`` the number of its rows of
    `CurvePointModel`. ``last_value`` is the value at ``last_step``, None if it is not finite.
    """

    __tablename__ = "curves"
    __table_args__ = (
        Index(None, "digest", unique=True),
        Index(None, "run_id"),
        Index(None, "updated_ns"),
    )

    id: Mapped[int] = mapped_column(Key, primary_key=True, autoincrement=False)
    digest: Mapped[bytes]
    run_id: Mapped[str]
    name: Mapped[str]
    unit: Mapped[str]
    attributes: Mapped[str]
    points: Mapped[int]
    first_step: Mapped[int]
    last_step: Mapped[int]
    last_value: Mapped[float | None]
    updated_ns: Mapped[int]


class CurvePointModel(Base):
    """The value of a curve at a step, None if it is not finite."""

    __tablename__ = "curve_points"
    __table_args__ = ({"sqlite_with_rowid": False},)

    curve: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    value: Mapped[float | None]


class CurveBlockModel(Base):
    """Aggregate of the points of `BLOCK` steps, from which a long curve is read.

    ``points`` is the number of finite values; if it is 0, ``mean``, ``low`` and ``high`` are None.
    """

    __tablename__ = "curve_blocks"
    __table_args__ = ({"sqlite_with_rowid": False},)

    curve: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    block: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    points: Mapped[int]
    mean: Mapped[float | None]
    low: Mapped[float | None]
    high: Mapped[float | None]


BLOCK = 16
"""Number of consecutive steps of a `CurveBlockModel`."""


class LoadSeriesModel(Base):
    """A metric of an engine or node over time, see `batch.LoadPoint`.

    No point is before ``first_s`` or after ``last_s``, in seconds since 1970.
    """

    __tablename__ = "load_series"
    __table_args__ = (Index(None, "digest", unique=True),)

    id: Mapped[int] = mapped_column(Key, primary_key=True, autoincrement=False)
    digest: Mapped[bytes]
    kind: Mapped[str]
    subject: Mapped[str]
    metric: Mapped[str]
    is_counter: Mapped[bool]
    device: Mapped[str]
    run_id: Mapped[str]
    first_s: Mapped[int]
    last_s: Mapped[int]
    updated_ns: Mapped[int]


class LoadPointModel(Base):
    """Value and total of a `LoadSeriesModel` in one second."""

    __tablename__ = "load_points"
    __table_args__ = ({"sqlite_with_rowid": False},)

    series: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    second: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    value: Mapped[float]
    total: Mapped[float]


class AlertModel(Base):
    """An alert; ``cleared_ns`` is None while it is raised."""

    __tablename__ = "alerts"
    __table_args__ = (Index(None, "cleared_ns"),)

    id: Mapped[int] = mapped_column(Key, primary_key=True, autoincrement=False)
    name: Mapped[str]
    kind: Mapped[str]
    severity: Mapped[str]
    run_id: Mapped[str]
    subject: Mapped[str]
    value: Mapped[float]
    bound: Mapped[float]
    sentence: Mapped[str]
    raised_ns: Mapped[int]
    cleared_ns: Mapped[int | None]


class NotificationModel(Base):
    """A notification that a webhook has not received; deleted once delivered or dropped.

    ``next_ns`` is the time of the next attempt. Before an attempt, a service moves ``next_ns``
    beyond the attempt's deadline, so that no other service sends the notification at the same time.
    """

    __tablename__ = "notifications"
    __table_args__ = (Index(None, "webhook", "id"),)

    id: Mapped[int] = mapped_column(Key, primary_key=True, autoincrement=False)
    webhook: Mapped[str]
    message: Mapped[str]
    body: Mapped[str]
    error: Mapped[str]
    attempts: Mapped[int]
    created_ns: Mapped[int]
    next_ns: Mapped[int]


class AlertHolderModel(Base):
    """The single row: the lease of the service that evaluates the rules, until ``until_ns``."""

    __tablename__ = "alert_holder"

    id: Mapped[int] = mapped_column(Key, primary_key=True, autoincrement=False)
    holder: Mapped[str]
    until_ns: Mapped[int]


class AuditModel(Base):
    """An entry of the audit log; ``parameters`` is JSON."""

    __tablename__ = "audit"

    id: Mapped[int] = mapped_column(Key, primary_key=True, autoincrement=False)
    time_ns: Mapped[int]
    actor: Mapped[str]
    action: Mapped[str]
    target: Mapped[str]
    parameters: Mapped[str]
    outcome: Mapped[str]
