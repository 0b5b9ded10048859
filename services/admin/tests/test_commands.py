"""Commands against a running service.

Imports internals: a console of 80 columns for answers with traces of other days.
"""

import contextlib
import io
import json
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from importlib.metadata import version
from urllib.parse import urlencode

import pytest
from rich.console import Console
from typer.main import get_command
from typer.testing import CliRunner
from waiting import until

from dataplane_admin.cli import app
from dataplane_admin.cli.terminal import show

TIMEOUT_S = 60.0
TOKEN = "3f2b8c0d9e7a6b5c"


def command(*arguments):
    """Run a command in this process, which is faster, against a real service."""
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, arguments)
    return done.exit_code, done.stdout, done.stderr


def test_version_is_printed_and_wrong_usage_has_status_2():
    assert command("--version")[:2] == (0, f"dataplane-admin {version('dataplane-admin')}\n")
    assert command("nothing")[0] == command("why", "--nothing")[0] == 2


def test_options_have_the_name_of_their_variable():
    # Typer names the variable after the parameter.
    for each in get_command(app).commands.values():
        for parameter in each.params:
            if parameter.param_type_name == "option":
                assert f"--{parameter.name.replace('_', '-')}" in parameter.opts


def test_every_help_starts_with_an_example_and_cuts_nothing():
    for name in ((), *((name,) for name in get_command(app).commands)):
        done = CliRunner(env={"COLUMNS": "80"}).invoke(app, [*name, "--help"])
        beginning, _, options = done.stdout.partition("\u256d")
        assert re.search(f"^ Example: dataplane-admin {' '.join(name)}.*\n *\n", beginning, re.M)
        assert max(map(len, done.stdout.splitlines())) <= 80
        assert "\u2026" not in done.stdout
        assert "[env var" not in done.stdout
        assert "DATAPLANE_ADMIN_SERVE_PORT" in options


def test_shell_completion_lists_the_options_of_an_unfinished_line():
    for line in (*get_command(app).commands, "serve --db /no/folder/file"):
        words = ["dataplane-admin", *line.split(), "--"]
        variables = {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
        variables["_DATAPLANE_ADMIN_COMPLETE"] = "complete_bash"
        done = CliRunner(env=variables).invoke(app, prog_name="dataplane-admin")
        assert (done.exit_code, done.stdout.split()[-1:]) == (0, ["--help"])


def test_commands_start_without_the_slow_imports_of_the_service():
    program = (
        "import sys; import dataplane_admin.cli; slow = {'fastapi', 'sqlalchemy', 'uvicorn'}; "
        "sys.exit(', '.join(slow & set(sys.modules)) or None)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture(scope="module")
def token_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("token") / "token"
    file.write_text(f"{TOKEN}\n")
    return str(file)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["partitions"], ["train", "8 samples present", "input_ids"]),
        (["sample", "step0_p0_g0"], ["step0_p0_g0", "put", "cleared"]),
        (["traces", "--run", "tests"], ["grpo.step"]),
        (["why"], ["3 of 8 lack advantages"]),
        (["runs", "--text", "TEST", "--sort", "steps"], ["tests", "running"]),
        (["alerts"], ["No alert is raised."]),
        (["alerts", "--schema"], ["reward_collapsed", "not_finite", '"above"', "webhooks"]),
        (["tag", "tests", "good", "old"], ["run 'tests' has the tags good, old"]),
        (["runs", "--tag", "old"], ["tests", "good, old"]),
    ],
)
def test_a_command_shows_what_the_api_answers(running, token_file, arguments, shown):
    line = [*arguments, "--url", running.url, "--token-file", token_file]
    deadline = time.monotonic() + TIMEOUT_S
    while True:  # the last events arrive shortly after the URL
        status, out, err = command(*line)
        if all(text in out for text in shown) or time.monotonic() > deadline:
            break
    assert (status, err) == (0, "")
    for text in shown:
        assert text in out
    status, out, _ = command(*line, "--json")
    assert status == 0
    assert json.loads(out)


def test_a_trace_id_is_accepted_in_any_copied_form(running, token_file):
    options = ["--url", running.url, "--token-file", token_file]
    _, listed, _ = command("traces", "--json", *options)
    trace_id = json.loads(listed)["traces"][0]["trace_id"]
    spaced = f" {trace_id[:16]} {trace_id[16:]}"
    for given in (trace_id, trace_id.upper(), f"{trace_id[:8]}-{trace_id[8:]}", spaced):
        status, out, err = command("trace", given, *options)
        assert (status, err) == (0, "")
        assert out.startswith(f"{trace_id}  ")
        request = urllib.request.Request(
            f"{running.url}/compare?{urlencode({'a': given, 'b': given})}",
            headers={"authorization": f"Bearer {TOKEN}"},
        )
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            assert trace_id in answer.read().decode()


@pytest.mark.parametrize(
    ("line", "page", "other"),
    [
        # The page lists the oldest claim by generator.
        (["partitions"], "/partition?id=train", {"oldest claim"}),
        (["traces"], "/traces", {"trace"}),  # the page links to it
        (["runs"], "/runs", {"error"}),  # the page has it in the run's cell
    ],
)
def test_tables_have_the_headings_of_the_pages(running, token_file, line, page, other):
    _, out, _ = command(*line, "--url", running.url, "--token-file", token_file)
    first = {"task", "field", "trace", "run"}
    shown = {
        heading
        for each in out.splitlines()
        if (headings := re.split(r" {2,}", each.strip()))[0] in first
        for heading in headings
    }
    request = urllib.request.Request(
        f"{running.url}{page}", headers={"authorization": f"Bearer {TOKEN}"}
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        cells = re.findall(r'<th scope="col".*?</th>', answer.read().decode(), re.S)
    titles = {re.sub("<[^>]*>", "", cell).strip(" ↑↓").lower() for cell in cells}
    assert len(shown) > 3
    assert shown - titles <= other


@pytest.mark.parametrize("columns", ["20", "60", "80"])
def test_a_table_never_breaks_an_id(running, token_file, columns):
    options = ["--url", running.url, "--token-file", token_file]
    _, listed, _ = command("traces", "--json", *options)
    ids = [trace["trace_id"] for trace in json.loads(listed)["traces"]]
    _, life, _ = command("sample", "step0_p0_g0", "--json", *options)
    named = [hop["trace_id"] for hop in json.loads(life)["hops"] if hop["trace_id"]]
    for arguments, expected in (
        (["traces"], ids),
        (["sample", "step0_p0_g0"], ["step0_p0_g0", "input_ids", *named]),
        (["trace", ids[0]], ids[:1]),
        (["partitions"], ["input_ids", "advantages"]),
    ):
        done = CliRunner(env={"COLUMNS": columns}).invoke(app, [*arguments, *options])
        for text in expected:
            assert text in done.stdout
        if columns == "80":
            assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.parametrize(("age_s", "state"), [(0, "in progress"), (100, "no root")])
def test_an_old_trace_without_a_root_fits_80_columns(running, token_file, age_s, state):
    _, listed, _ = command("traces", "--json", "--url", running.url, "--token-file", token_file)
    answer = json.loads(listed)
    answer["traces"][0] |= {
        "name": "grpo.generate",
        "has_root": False,
        "step": 12345,
        "start_ns": 1_790_000_000_000_000_000,
        "received_ns": time.time_ns() - age_s * 10**9,
        "seconds": 3599.0,
    }
    console = Console(file=io.StringIO(), width=80)
    show("/api/v1/traces", json.dumps(answer), console)
    shown = console.file.getvalue()
    assert answer["traces"][0]["trace_id"] in shown
    assert f"grpo.generate ({state})" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_a_failed_command_prints_one_line(running, token_file):
    for arguments, expected, message in (
        (["why", "--url", running.url], 1, "--token-file"),
        (["sample", "nothing", "--url", running.url, "--token-file", token_file], 1, "no event"),
        (["partitions", "--url", "http://127.0.0.1:1"], 1, "cannot be reached"),
        (["partitions", "--url", "nonsense"], 2, "--url"),
        (["runs", "--state", "x", "--url", running.url, "--token-file", token_file], 2, "state"),
        (["runs", "--sort", "x", "--url", running.url, "--token-file", token_file], 2, "sort"),
        (["trace", "x", "--url", running.url, "--token-file", token_file], 2, "id: found 'x'"),
        (["partitions", "--token-file", "no/such/file"], 2, "no/such/file"),
        (["sample"], 2, ": ID: missing; see "),
    ):
        status, out, err = command(*arguments)
        assert (status, out, err.count("\n")) == (expected, "", 1)
        assert message in err
        assert TOKEN not in err


def post(url, body, **headers):
    request = urllib.request.Request(
        f"{url}/v1/traces",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json", **headers},
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        return answer.status


def test_secrets_are_never_written(start, token_file, tmp_path):
    service = start("--token-file", token_file)
    bearer = {"authorization": f"Bearer {TOKEN}"}
    login = urllib.request.Request(f"{service.url}/login", data=f"token={TOKEN}".encode())
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    with opener.open(login, timeout=TIMEOUT_S) as page:
        assert page.status == 200
    for path in ("/api/v1/status", f"/api/v1/trace?id={TOKEN}", f"/{TOKEN}"):
        request = urllib.request.Request(f"{service.url}{path}", headers=bearer)
        with contextlib.suppress(urllib.error.HTTPError):
            opener.open(request, timeout=TIMEOUT_S).close()
    with pytest.raises(urllib.error.HTTPError):
        post(service.url, {}, authorization=f"Bearer {TOKEN}x")
    assert post(service.url, {}, **bearer) == 200
    _, _, written = service.stop(signal.SIGTERM)
    assert "wrong_token" in written  # the log is not empty
    assert TOKEN not in written
    for file in tmp_path.glob("*.sqlite*"):
        assert TOKEN.encode() not in file.read_bytes()


def test_why_says_that_the_data_plane_cannot_be_read(start):
    assert command("why", "--url", start().url) == (0, "No task is blocked.\n", "")
    service = start("--ray-address", "127.0.0.1:1", "--db", "other.sqlite")
    shown = until(
        lambda: (
            "Cannot read the data plane" in (out := command("why", "--url", service.url)[1]) and out
        )
    )
    assert "No task is blocked." in shown


def test_the_database_file_is_at_the_given_path(start, tmp_path):
    start("--db", "here.sqlite").stop(signal.SIGTERM)
    assert (tmp_path / "here.sqlite").stat().st_mode & 0o077 == 0
