"""Tests that need a Debian package are left out where it is missing, and are listed by name."""

from __future__ import annotations

from collections import Counter

import pytest
from integration.system_packages import NEEDS, missing, packages_of

LEFT_OUT = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--list-left-out",
        action="store_true",
        help="list the tests that need a Debian package which is missing, and run none",
    )


@pytest.hookimpl(trylast=True)  # when the others have removed what they do not run
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    absent = missing()
    tests: Counter[tuple[str, str]] = Counter()
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
                tests[name, item.location[0]] += 1
    config.stash[LEFT_OUT] = [
        f"left out without {name}: {count} of {path}" for (name, path), count in tests.items()
    ]
    if config.getoption("--list-left-out"):
        items.clear()


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    return config.stash[LEFT_OUT]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("--list-left-out"):
        session.exitstatus = pytest.ExitCode.OK  # not "no tests"
