"""Checks the language of code and pages as far as a machine can: `make lint`.

It reads names, docstrings, comments and strings of every Python file, the text of every page,
template and container file, the names of all these files, and the messages of new commits: those
after BASE_COMMIT, else those that main lacks; on main, those that origin/main lacks.
CONTRIBUTING.md has the rules; a machine can check only a few of them. Ruff's D401 checks that
docstrings are imperative.
"""

from __future__ import annotations

import ast
import io
import os
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAX_SUBJECT = 72
SUFFIXES = ["*.py", "*.md", "*.html.j2", "*.js", "*.yaml", "*.yml", "*.toml", "Makefile"]
SUFFIXES += ["*Dockerfile", "docker/*"]
EXEMPT = re.compile(r"/vendor/|CHANGELOG|integration/(?:test_)?language\.py")
# Since Python 3.12, an f-string is several tokens.
TEXT_TOKENS = {
    tokenize.COMMENT,
    tokenize.STRING,
    getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING),
}

# Each pattern with what to write in its place.
PHRASES = {
    r"not told|is not known|are not known|was not known": "unknown, n/a",
    r"tell|tells|told": "record, report, print, show, say; of two things: distinguish",
    r"patient(ly)?": "retry",
    r"looks? into|looked into|looking into|onlookers?|lookers?": "inspect, inspector",
    r"heard of": "last seen, silent",
    r"what waits|what it waits for": "blocked, blocked on",
    # As a name, `settle` is the operation of OpenTelemetry's messaging conventions.
    r"(?:un)?settled|settling|settles?(?! (?:train|\{partition))(?![\"'`])": "acknowledge",
    r"g[ia]ves? back|giving back|given back": "release, return",
    r"lapses?|lapsed": "expire",
    r"is over|are over|was over|has ended|have ended": "finished, failed, expired: which one",
    r"excuses?|excused": "extend the grace period",
    r"ours": "name the thing: the packed backend, this package",
    r"st[ao]nds? still|stood still|standing still": "idle, stalled",
    r"go on|goes on|went on|going on": "continue",
    r"in one look": "one consistent snapshot",
    r"left ?over|left-?overs?": "remaining, orphaned",
    r"makes? up for|made up for": "recover, repair",
    r"lies? in|lies? on|lay in": "is in, is stored in",
    r"mends?|mended|mending": "repair, recover, fix",
    r"whole": "complete, entire, all of; or leave it out",
    r"by itself|by themselves|of its own|of their own": "separate, dedicated, alone",
    r"beside": "alongside, next to, co-located with",
    r"rooms?": "capacity, free space; of a package: subpackage",
    r"typical": "median",
    r"in turns": "alternating, interleaved",
    r"somebody|someone|nobody|whom": "name who: the caller, a consumer, no process",
    r"much like|is such that": "say it directly",
}
PHRASE = re.compile(
    "|".join(rf"(?P<p{number}>\b(?:{pattern})\b)" for number, pattern in enumerate(PHRASES)),
    re.IGNORECASE,
)
ADVICE = list(PHRASES.values())

# First words of a fragment. A statement may begin with "For" or "With" too, but seldom does.
FRAGMENTS = re.compile(
    r"(?:Of|That|Whom|What|How|Why|Whether|Which|Who|Whose|Where|When|As|If|And|Or|But|With|For|In"
    r"|On|At|By|To|From|Until|Since|Because|So|Than|Such|Like|Also|Again|Its|Empty if|\d+)\b"
)
# Parts of names that narrate, and names that describe no variable.
STORY = re.compile(
    r"(?:.*_)?(told|tells?|most|least|patien(?:t|tly|ce)|beside|early|mood|rove|tether|onlooker"
    r"|meeting|leftovers|whom|excuse|lapse|mend|mended)(?:_.*)?",
    re.IGNORECASE,
)
EMPTY_NAMES = frozenset({"found", "told", "asked", "made", "one", "some", "mine", "ours", "theirs"})
# Names of other libraries, and terms of the field.
ALLOWED_NAMES = frozenset({"tell", "least_significant_bit", "most_common"})


def main() -> int:
    """Print every breach in the given files, or in all files that git has; return the status."""
    names = sys.argv[1:]
    listed = subprocess.run(
        ["git", "ls-files", "--", *(names or SUFFIXES)],
        cwd=ROOT,
        check=True,
        text=True,
        capture_output=True,
    ).stdout.splitlines()
    breaches = 0
    for name in listed:
        path = ROOT / name
        if not path.is_file() or EXEMPT.search(name):
            continue
        for breach in path_breaches(name):
            print(f"{name}: {breach}")
            breaches += 1
        check = python_breaches if name.endswith(".py") else text_breaches
        for line, breach in check(path.read_text("utf-8")):
            print(f"{name}:{line}: {breach}")
            breaches += 1
    if not names:
        base = base_commit()
        if base is None:
            print("language: commit messages are not checked: git has no BASE_COMMIT or main")
        for breach in message_breaches(base) if base else ():
            print(breach)
            breaches += 1
    print(f"language: breaches: {breaches} in {len(listed)} files")
    return min(breaches, 1)


def python_breaches(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and breach of each name, docstring, comment and string of a module."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in TEXT_TOKENS:
            for line, breach in text_breaches(token.string):
                yield token.start[0] + line - 1, breach
    for node in ast.walk(ast.parse(source)):
        yield from _docstring_breaches(node)
        for name in _names(node):
            line = getattr(node, "lineno", 1)
            for breach in _name_breaches(name):
                yield line, breach


def path_breaches(path: str) -> Iterator[str]:
    """Yield a breach for each folder and file in a path whose name says nothing or narrates."""
    for part in Path(path).parts:
        yield from _name_breaches(part.lstrip(".").partition(".")[0].replace("-", "_"))


def text_breaches(text: str) -> Iterator[tuple[int, str]]:
    """Yield line and breach of each phrase of a text; a phrase may go over the end of a line."""
    for match in PHRASE.finditer(re.sub(r"\s", lambda space: space[0].replace("\n", " "), text)):
        number = int(match.lastgroup[1:]) if match.lastgroup else 0
        line = text.count("\n", 0, match.start()) + 1
        yield line, f"{match[0]!r}: write {ADVICE[number]}"


def base_commit(root: Path = ROOT) -> str | None:
    """Return the commit that the new commits follow, or None if git has no such commit."""
    given = os.environ.get("BASE_COMMIT")
    head = _git(root, "rev-parse", "HEAD").strip()
    forks = [
        fork
        for ref in ([given] if given else ["main", "origin/main"])
        if (fork := _git(root, "merge-base", ref, "HEAD").strip())
    ]
    return next((fork for fork in forks if fork != head), head if forks else None)


def message_breaches(base: str, root: Path = ROOT) -> Iterator[str]:
    """Yield a breach for each bad subject, and for each phrase, of the commits after ``base``."""
    log = _git(root, "log", "-z", "--no-merges", "--format=%h %B", f"{base}..HEAD")
    for entry in filter(None, log.split("\0")):
        commit, _, message = entry.partition(" ")
        subject = message.partition("\n")[0]
        if len(subject) > MAX_SUBJECT:
            yield f"{commit}: subject has {len(subject)} characters, more than {MAX_SUBJECT}"
        if not re.match(r"[\w., /-]+: \S", subject):
            yield f"{commit}: subject {subject!r} is not 'scope: what changes'"
        for line, breach in text_breaches(message):
            yield f"{commit}:{line}: {breach}"


def _git(root: Path, *arguments: str) -> str:
    """Return the output of a command of git, which is empty if it fails."""
    done = subprocess.run(
        ["git", *arguments], cwd=root, check=False, text=True, capture_output=True
    )
    return done.stdout if done.returncode == 0 else ""


def _name_breaches(name: str) -> Iterator[str]:
    """Yield the breach of a name."""
    if name.lower() in EMPTY_NAMES:
        yield f"name {name!r} says nothing"
    elif name not in ALLOWED_NAMES and (story := STORY.fullmatch(name)):
        yield f"name {name!r} has {story[1]!r}"


def _docstring_breaches(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the breach of the first line of a docstring, also of an attribute's."""
    body = getattr(node, "body", [])
    for inner in body if isinstance(body, list) else []:
        if not (isinstance(inner, ast.Expr) and isinstance(inner.value, ast.Constant)):
            continue
        text = inner.value.value
        if isinstance(text, str) and (first := FRAGMENTS.match(text.lstrip())):
            yield inner.lineno, f"docstring begins with {first[0]!r}: name the thing or the action"


def _names(node: ast.AST) -> Iterator[str]:
    """Yield the names that a node gives to something."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node.id if isinstance(node, ast.Name) else node.attr


if __name__ == "__main__":
    sys.exit(main())
