"""Skip the tests whose Debian package is missing, and list them by name."""

from __future__ import annotations

import os
from collections import Counter

import pytest
from integration.rare_gc import pytest_collection_finish, pytest_runtest_logfinish
from integration.system_packages import NEEDS, missing, packages_of

__all__ = ["pytest_collection_finish", "pytest_runtest_logfinish"]

# Tests start separate Ray clusters; a run refuses to while this names another one.
os.environ.pop("RAY_ADDRESS", None)

LEFT_OUT = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--list-left-out",
        action="store_true",
        help="list the tests whose Debian package is missing, and run none",
    )


@pytest.hookimpl(trylast=True)  # after other plugins have deselected tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    absent = missing()
    tests: dict[tuple[str, str], Counter[str]] = {}
    for item in items:
        marked = {str(name) for mark in item.iter_markers("debian") for name in mark.args}
        if unknown := marked - NEEDS.keys():
            raise pytest.UsageError(f"{item.nodeid}: mark 'debian' names {sorted(unknown)}")
        fixtures = getattr(item, "fixturenames", ())
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        for name in absent:
            need = NEEDS[name]
            if (
                name in marked
                or any(fixture in need.fixtures for fixture in fixtures)
                or any(isinstance(value, str) and value in need.parameters for value in parameters)
            ):
                reason = f"needs the Debian packages {', '.join(packages_of([name]))}"
                item.add_marker(pytest.mark.skip(reason=reason))
                counts = tests.setdefault((name, item.location[0]), Counter())
                counts[item.location[2].partition("[")[0]] += 1
    config.stash[LEFT_OUT] = [
        f"left out without {name}: {counts.total()} of {path}: {_listed(counts)}"
        for (name, path), counts in tests.items()
    ]
    if config.getoption("--list-left-out"):
        items.clear()


def _listed(tests: Counter[str]) -> str:
    return ", ".join(f"{name} ({n} times)" if n > 1 else name for name, n in tests.items())


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    return config.stash[LEFT_OUT]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("--list-left-out"):
        session.exitstatus = pytest.ExitCode.OK  # not "no tests"
