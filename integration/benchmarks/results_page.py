"""Fill the tables of docs/results.md from a file of results.

``python -m integration.benchmarks.results_page`` fills them from ``build/bench.json``, into which
all benchmarks merge their results.

A table is known by the first cell of its heading, a row by its first cell. `TABLES` has the results
of each row's other cells; a cell without a result in the file stays as it is.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_CASES = ("256", "512", "256_long", "1024_8k")
_LAYOUTS = [f"{layout}{size}" for size in ("", "_2g") for layout in ("1to1", "2to4", "4to2")]


@dataclass(frozen=True)
class Cell:
    """Results of a cell, by name.

    With ``spread``, the interquartile range of the first is in parentheses. If ``sep`` is " to ",
    only the lowest and the highest value are shown.
    """

    names: tuple[str, ...]
    sep: str = "/"
    spread: bool = False
    unit: str = ""


def _ratios(name: str) -> list[Cell]:
    return [Cell((name.format(case),), spread=True) for case in _CASES]


def _durations(operation: str) -> list[Cell]:
    systems = ("data_plane", "usual", "raw", "ray_flat", "ray_flat_padded")
    here, *others = (f"tq.{operation}_512.{system}_ms" for system in systems)
    return [Cell((name,)) for name in (here, f"tq.{operation}_512_tcp.data_plane_ms", *others)]


def _claims(size: str) -> list[Cell]:
    regimes = ("", "warm_", "raw_", "raw_warm_")
    points = [f"tq.claim32_{size}.{regime}p{{}}_ms" for regime in regimes]
    return [Cell((point.format(50), point.format(99))) for point in points]


def _refits(way: str) -> list[Cell]:
    return [
        Cell((f"refit.{way}_{layout}.publish_ms", f"refit.{way}_{layout}.fetch_ms"))
        for layout in _LAYOUTS
    ]


def _range(transport: str, suffix: str) -> Cell:
    names = (f"refit.{transport}_{layout}.ratio_vs_{suffix}" for layout in _LAYOUTS)
    return Cell(tuple(names), sep=" to ")


def _asynchronous(name: str) -> list[Cell]:
    run = f"async.{name}"
    return [
        Cell((f"{run}.samples_per_s",)),
        Cell((f"{run}.ratio_vs_sync",), spread=True),
        Cell((f"{run}.policy_idle_pct",), unit=" %"),
        Cell((f"{run}.generators_idle_pct",), unit=" %"),
        Cell((f"{run}.staleness",)),
    ]


def _traced(suffix: str) -> list[Cell]:
    step = f"trace.step{suffix}"
    return [
        Cell((f"trace.spans_per_step{suffix}",)),
        Cell((f"{step}_inside_ms",), spread=True, unit=" ms"),
        Cell((f"{step}_inside_us_per_span",), unit=" us"),
        Cell((f"{step}_background_ms",), unit=" ms"),
        Cell((f"{step}_inside_pct",), unit=" %"),
    ]


def _grown(suffix: str, spread: bool = False) -> list[Cell]:
    operations = ("put", "claim", "acknowledge", "clear")
    return [Cell((f"growth.{each}32_1m.{suffix}",), spread=spread) for each in operations]


def _from_another_node(suffix: str, spread: bool = False) -> list[Cell]:
    put, claim, get = (
        Cell((f"growth.nodes_{each}32.{suffix}",), spread=spread)
        for each in ("put", "claim", "get")
    )
    return [put, claim, Cell(()), Cell(()), get]


def _bulk_from_another_node(suffix: str, spread: bool = False) -> list[Cell]:
    put, get = (
        Cell((f"growth.nodes_{each}_bulk.{suffix}",), spread=spread) for each in ("put", "get")
    )
    return [put, Cell(()), Cell(()), Cell(()), get]


def _own_api(call: str, processes: int) -> list[Cell]:
    name = f"tq_api.{call}_{processes}"
    durations = [Cell((f"{name}.{backend}_ms",)) for backend in ("simple", "packed")]
    nothing = Cell((f"{name}.nothing_ms",) if call != "get" else ())
    return [*durations, nothing, Cell((f"{name}.ratio_vs_packed",), spread=True)]


def _journal(tokens: int) -> list[Cell]:
    name = f"journal.{tokens}"
    return [
        Cell((f"{name}.ms",)),
        Cell((f"{name}.kb",)),
        Cell((f"{name}.ratio_vs_put",), spread=True),
    ]


TABLES: dict[str, dict[str, list[Cell]]] = {
    "put and get, ratios": {
        "usual adapter / here": _ratios("tq.put_get_{}.ratio_vs_usual"),
        "usual adapter / here over TCP": _ratios("tq.put_get_{}_tcp.ratio_vs_usual"),
        "here / Ray's flat buffers": _ratios("tq.put_get_{}.ratio_vs_ray_flat"),
        "here / Ray, padded": _ratios("tq.put_get_{}.ratio_vs_ray_flat_padded"),
        "get in eight slices, usual adapter / here": _ratios("tq.slices8_{}.ratio_vs_usual"),
    },
    "512 rows of 200 to 2,048 tokens, ms": {
        "put": _durations("put"),
        "get": _durations("get"),
        "put and get": _durations("put_get"),
        "get in eight slices, one after the other": _durations("slices8"),
        "write back one token column": _durations("write_back"),
        "claim 32, right after the put": _durations("claim32"),
        "clear all rows": _durations("clear"),
    },
    "claim of 32; rows in the partition": {
        "1,000": _claims("1k"),
        "10,000": _claims("10k"),
        "100,000": _claims("100k"),
    },
    "operation on 32 rows": {
        "among a million rows, ms": _grown("p50_ms"),
        "among a million, times as long as among 1,024": _grown("ratio_vs_1k", spread=True),
        "from another node, times as long as on the same": _from_another_node(
            "ratio_vs_same_node", spread=True
        ),
        "34 MB from another node, times as long": _bulk_from_another_node(
            "ratio_vs_same_node", spread=True
        ),
    },
    "clients": {
        "put to clear, p50/p99 ms": [
            Cell((f"growth.clients_{count}.cycle_p50_ms", f"growth.clients_{count}.cycle_p99_ms"))
            for count in (1, 8, 64)
        ],
    },
    "TransferQueue's own API": {
        "put, one process": _own_api("put", 1),
        "put, four processes": _own_api("put", 4),
        "put of one row, one process": _own_api("put_row", 1),
        "put of one row, four processes": _own_api("put_row", 4),
        "get, one process": _own_api("get", 1),
        "get, four processes": _own_api("get", 4),
    },
    "tokens of a sample": {f"{tokens:,}": _journal(tokens) for tokens in (256, 1_024, 4_096)},
    "step of the demo": {"traced": _traced(""), "verbose": _traced("_verbose")},
    "generation, variant": {
        "slow, synchronous": _asynchronous("slow_sync"),
        **{
            f"slow, `max_staleness: {bound}`": _asynchronous(f"slow_staleness{bound}")
            for bound in (0, 1, 2, 4)
        },
        "fast, synchronous": _asynchronous("fast_sync"),
        "fast, `max_staleness: 1`": _asynchronous("fast_staleness1"),
    },
    "publish/fetch, ms": {
        "refit-mx, shared memory": _refits("shm"),
        "refit-mx, NIXL": _refits("nixl"),
        "refit-mx, TCP": _refits("tcp"),
        "Ray's object store": _refits("ray"),
        "safetensors on tmpfs": _refits("file"),
        "raw NIXL, fetch in long reads": _refits("raw_nixl_long"),
        "gloo broadcast, publish and fetch together": _refits("gloo"),
        "memcpy of as many bytes": _refits("memcpy"),
    },
    "refit-mx, times as fast": {
        "shared memory against Ray": [_range("shm", "ray_both_steps"), _range("shm", "ray")],
        "NIXL against Ray": [_range("nixl", "ray_both_steps"), _range("nixl", "ray")],
        "NIXL against raw NIXL in long reads": [Cell(()), _range("nixl", "raw_nixl_long")],
    },
    "admin service": {
        "ingest into SQLite, spans/s": [Cell(("admin.ingest_spans_per_s",), spread=True)],
        "the same requests appended to a file, spans/s": [
            Cell(("admin.ingest_file_spans_per_s",), spread=True)
        ],
        "ingest into the filled store, spans/s": [
            Cell(("admin.full_store_ingest_spans_per_s",), spread=True)
        ],
        "slowest other page or answer, p95": [Cell(("admin.page_p95_ms",), unit=" ms")],
        "page of a trace of 10,000 spans, p95": [Cell(("admin.large_trace_p95_ms",), unit=" ms")],
        "slowest other first paint, median": [Cell(("admin.first_paint_ms",), unit=" ms")],
        "first paint of that trace, median": [
            Cell(("admin.large_trace_first_paint_ms",), unit=" ms")
        ],
    },
}


def fill(page: str, results: Iterable[dict[str, object]]) -> str:
    """Return the page with the values of ``results``, entries of a file of results."""
    by_name = {entry["name"]: entry for entry in results}
    rows: dict[str, list[Cell]] = {}
    lines = []
    for line in page.split("\n"):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            rows = {}
        elif not rows:
            rows = TABLES.get(cells[0], {})
        if line.startswith("|") and cells[0] in rows:
            for at, cell in enumerate(rows[cells[0]], 1):
                cells[at] = _text(cell, by_name) or cells[at]
            line = f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |")
        lines.append(line)
    return "\n".join(lines)


def _text(cell: Cell, results: dict[object, dict[str, object]]) -> str:
    measured = [results[name] for name in cell.names if name in results]
    values = [float(str(entry["value"])) for entry in measured]
    if not values:
        return ""
    if cell.sep == " to ":
        return f"{min(values):.2f} to {max(values):.2f}"
    shown = cell.sep.join(map(_number, values)) + cell.unit
    return f"{shown} ({_number(float(str(measured[0]['spread'])), 2)})" if cell.spread else shown


def _number(value: float, digits: int = 3) -> str:
    """Return a number with three significant digits, or all digits before the decimal point."""
    return f"{value:,.0f}" if value >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def main() -> None:
    """Fill the page that the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, default=Path("build/bench.json"))
    parser.add_argument("--page", type=Path, default=Path("docs/results.md"))
    options = parser.parse_args()
    results = json.loads(options.json.read_text())
    options.page.write_text(fill(options.page.read_text(), results))
    measured = {entry["name"] for entry in results}
    for title, rows in TABLES.items():
        for label, cells in rows.items():
            if any(name not in measured for cell in cells for name in cell.names):
                print(f"not all cells are in {options.json}: {title}: {label}")


if __name__ == "__main__":
    main()
