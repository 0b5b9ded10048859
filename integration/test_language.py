"""The language check finds each kind of breach, and nothing in plain text."""

from __future__ import annotations

import pytest
from integration.language import python_breaches, text_breaches


@pytest.mark.parametrize(
    "source",
    [
        'def f():\n    """Of what arrived."""\n',
        "def f():\n    told = 1\n    return told\n",
        "def f(most_rows): ...\n",
        "def test_a_wait_is_told(): ...\n",
        "# Nobody reads\n",
        "x = 'the lease lapsed'\n",
    ],
)
def test_each_kind_of_breach_is_found_once(source: str) -> None:
    assert len(list(python_breaches(source))) == 1


def test_a_phrase_across_two_lines_is_found_on_its_first_line() -> None:
    assert [line for line, _ in text_breaches("one\nit goes\non then\n")] == [2]


def test_plain_words_and_names_of_others_pass() -> None:
    assert list(text_breaches("The lease expired; `settle` is a span name.")) == []
    assert list(python_breaches('span = "settle train"\nmost_common = 1\n')) == []
