"""The tables, for SQLite and PostgreSQL alike.

Change a table here and add a migration beside `migrations/versions`; a test compares the two.

What anybody may send is text that a database may refuse or index badly, so ids of traces, spans and
samples are bytes, and names are stored as `texts.storable` makes them. Keys (`id`, `key`) are drawn
from ``state.last_id`` by the writer: they grow with every record and are never used again.
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
    false,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

# SQLite keeps a table in the order of its key only if that is declared INTEGER.
Key = BigInteger().with_variant(Integer(), "sqlite")


class Base(DeclarativeBase):
    """What all tables share: names of constraints that are the same in every database."""

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
    """One row: what is counted as it changes, because to count it by asking takes too long."""

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
    """A run, as soon as anything tells of it. Times are nanoseconds since 1970."""

    __tablename__ = "runs"

    run_id: Mapped[str] = mapped_column(primary_key=True)
    first_ns: Mapped[int]
    last_ns: Mapped[int]
    updated_ns: Mapped[int]


class TraceModel(Base):
    """What a list of traces shows of one.

    ``start_ns`` and ``end_ns`` are 0 if no span reported a time. ``arrival`` grows in the order in
    which traces came to this service, whatever the clocks of their senders say.
    ``process_digests`` are eight bytes of each process in it, ``nbytes`` those of its chunks.
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
    rejected: Mapped[int]
    nbytes: Mapped[int]
    updated_ns: Mapped[int]
    arrival: Mapped[int] = mapped_column(server_default="0")


class ChunkModel(Base):
    """The spans of one trace in one request: ``blob`` is an OTLP TracesData."""

    __tablename__ = "span_chunks"
    __table_args__ = (Index(None, "trace_id", "digest", unique=True),)

    id: Mapped[int] = mapped_column(Key, primary_key=True, autoincrement=False)
    trace_id: Mapped[bytes]
    digest: Mapped[bytes]
    spans: Mapped[int]
    received_ns: Mapped[int]
    blob: Mapped[bytes]


class SpanModel(Base):
    """A span has come, however often.

    ``trace`` is the ``arrival`` of its trace, ``span`` its id as `batch.span_key`, and ``state``
    that of `batch.span_state`: numbers, because there are so many of them.
    """

    __tablename__ = "spans"
    __table_args__ = ({"sqlite_with_rowid": False},)

    trace: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    span: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    state: Mapped[int]


class LinkModel(Base):
    """A trace links to another one."""

    __tablename__ = "trace_links"
    __table_args__ = (
        Index(None, "linked_id", "trace_id"),
        {"sqlite_with_rowid": False},
    )

    trace_id: Mapped[bytes] = mapped_column(primary_key=True)
    linked_id: Mapped[bytes] = mapped_column(primary_key=True)


class PlaceModel(Base):
    """A partition of a run; the empty partition is that of events which concern none.

    ``cleared_ns`` is when the whole partition was cleared last, 0 if it never was.
    """

    __tablename__ = "places"
    __table_args__ = (Index(None, "run_id", "partition", unique=True),)

    id: Mapped[int] = mapped_column(Key, primary_key=True, autoincrement=False)
    run_id: Mapped[str]
    partition: Mapped[str]
    cleared_ns: Mapped[int]


class EventModel(Base):
    """A lifecycle event: ``record`` is an OTLP LogsData without the ids, ``keys`` are the samples.

    ``keys`` are sample keys of eight bytes each, little-endian, in the order told. ``wait`` is a
    digest that the begin and the end of a wait share.
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


class SampleModel(Base):
    """A sample of a place. Its id is ``head`` and ``tail``, so that an index holds any id.

    ``put_ns`` and ``weight_version`` are those of its first put since it was cleared, or before the
    clear if none came later; ``gone_ns`` is its latest clear by name, and ``live_ns`` its latest
    put unless that clear came later; 0 where there was none.
    """

    __tablename__ = "samples"
    __table_args__ = (Index(None, "head", "key"), Index(None, "place_id", "live_ns"))

    key: Mapped[int] = mapped_column(Key, primary_key=True, autoincrement=False)
    place_id: Mapped[int]
    head: Mapped[bytes]
    tail: Mapped[bytes]
    weight_version: Mapped[int | None]
    put_ns: Mapped[int]
    live_ns: Mapped[int]
    gone_ns: Mapped[int]
    first_ns: Mapped[int]
    last_ns: Mapped[int]


class EventSampleModel(Base):
    """An event names a sample."""

    __tablename__ = "event_samples"
    __table_args__ = ({"sqlite_with_rowid": False},)

    sample_key: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    event_id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)


class OpenWaitModel(Base):
    """A wait that was told of and has not ended; ``process_id`` is the identity of who waits.
    ``again``: who waits tells of it again while it lasts."""

    __tablename__ = "open_waits"
    __table_args__ = (Index(None, "wait"),)

    event_id: Mapped[int] = mapped_column(Key, primary_key=True, autoincrement=False)
    wait: Mapped[bytes]
    place_id: Mapped[int]
    process: Mapped[str] = mapped_column(server_default="")
    process_id: Mapped[bytes] = mapped_column(server_default="")
    again: Mapped[bool] = mapped_column(server_default=false())


class SeriesModel(Base):
    """What the points of a metric series come to: ``value``, or ``histogram`` as JSON.

    ``sums`` is `series_sums.Sums` as JSON; ``points`` are eight bytes of each of the last points
    that came, by which one that is sent again is recognised.
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
    process_id: Mapped[bytes] = mapped_column(server_default="")
    scope: Mapped[str] = mapped_column(server_default="")
    sums: Mapped[str] = mapped_column(server_default="{}")
    points: Mapped[bytes] = mapped_column(server_default="")


class AuditModel(Base):
    """Something that a person did; ``parameters`` is JSON."""

    __tablename__ = "audit"

    id: Mapped[int] = mapped_column(Key, primary_key=True, autoincrement=False)
    time_ns: Mapped[int]
    actor: Mapped[str]
    action: Mapped[str]
    target: Mapped[str]
    parameters: Mapped[str]
    outcome: Mapped[str]
