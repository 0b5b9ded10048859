"""The commands give the answers of a running service, and a real service keeps its promises."""

import contextlib
import json
import signal
import time
import urllib.error
import urllib.request
from urllib.parse import urlencode

import pytest
from typer.testing import CliRunner

from dataplane_admin.cli import app

PATIENCE_S = 60.0
TOKEN = "3f2b8c0d9e7a6b5c"
SPAN = {
    "traceId": "0af7651916cd43dd8448eb211c80319c",
    "spanId": "b7ad6b7169203331",
    "name": "kept",
    "startTimeUnixNano": "1000000000",
    "endTimeUnixNano": "2000000000",
}


def command(*arguments):
    """In this process, whose imports are done; the service that is asked is a real one."""
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, arguments)
    return done.exit_code, done.stdout, done.stderr


@pytest.fixture(scope="module")
def token_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("token") / "token"
    file.write_text(f"{TOKEN}\n")
    return str(file)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["partitions"], ["train", "8 samples there", "input_ids"]),
        (["sample", "step0_p0_g0"], ["step0_p0_g0", "put", "cleared"]),
        (["traces", "--run", "tests"], ["grpo.step"]),
        (["why"], ["3 of 8 lack advantages"]),
    ],
)
def test_a_command_shows_what_the_api_answers(running, token_file, arguments, shown):
    asked = [*arguments, "--url", running.url, "--token-file", token_file]
    deadline = time.monotonic() + PATIENCE_S
    while True:  # the last events come a moment after the URL
        status, out, err = command(*asked)
        if all(text in out for text in shown) or time.monotonic() > deadline:
            break
    assert (status, err) == (0, "")
    for text in shown:
        assert text in out
    status, out, _ = command(*asked, "--json")
    assert status == 0
    assert json.loads(out)


def test_a_trace_id_is_taken_however_it_was_copied(running, token_file):
    asked = ["--url", running.url, "--token-file", token_file]
    _, listed, _ = command("traces", "--json", *asked)
    trace_id = json.loads(listed)["traces"][0]["trace_id"]
    spaced = f" {trace_id[:16]} {trace_id[16:]}"
    for given in (trace_id, trace_id.upper(), f"{trace_id[:8]}-{trace_id[8:]}", spaced):
        status, out, err = command("trace", given, *asked)
        assert (status, err) == (0, "")
        assert out.startswith(f"{trace_id}  ")
        request = urllib.request.Request(
            f"{running.url}/compare?{urlencode({'a': given, 'b': given})}",
            headers={"authorization": f"Bearer {TOKEN}"},
        )
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            assert trace_id in answer.read().decode()


@pytest.mark.parametrize("columns", ["20", "60", "80"])
def test_a_table_never_breaks_an_id(running, token_file, columns):
    asked = ["--url", running.url, "--token-file", token_file]
    _, listed, _ = command("traces", "--json", *asked)
    ids = [one["trace_id"] for one in json.loads(listed)["traces"]]
    _, life, _ = command("sample", "step0_p0_g0", "--json", *asked)
    named = [hop["trace_id"] for hop in json.loads(life)["hops"] if hop["trace_id"]]
    for arguments, expected in (
        (["traces"], ids),
        (["sample", "step0_p0_g0"], ["step0_p0_g0", "input_ids", *named]),
        (["trace", ids[0]], ids[:1]),
        (["partitions"], ["input_ids", "advantages"]),
    ):
        done = CliRunner(env={"COLUMNS": columns}).invoke(app, [*arguments, *asked])
        for one in expected:
            assert one in done.stdout


def test_what_has_no_answer_is_one_line_and_status_1(running, token_file):
    for arguments, said in (
        (["why", "--url", running.url], "--token-file"),
        (["sample", "nothing", "--url", running.url, "--token-file", token_file], "neither"),
        (["partitions", "--url", "http://127.0.0.1:1"], "cannot be reached"),
        (["partitions", "--url", "nonsense"], "--url"),
        (["partitions", "--token-file", "no/such/file"], "no/such/file"),
    ):
        status, out, err = command(*arguments)
        assert (status, out, err.count("\n")) == (1, "", 1)
        assert said in err
        assert TOKEN not in err


def post(url, body, **headers):
    request = urllib.request.Request(
        f"{url}/v1/traces",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json", **headers},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        return answer.status


def test_what_was_acknowledged_is_there_after_a_kill(start):
    service = start()
    told = {"resourceSpans": [{"scopeSpans": [{"spans": [SPAN]}]}]}
    assert post(service.url, told) == 200
    service.stop(signal.SIGKILL)
    again = start()
    with urllib.request.urlopen(f"{again.url}/api/v1/trace?id={SPAN['traceId']}") as answer:
        assert json.load(answer)["name"] == "kept"


def test_secrets_are_never_written(start, token_file, tmp_path):
    service = start("--token-file", token_file, "--ray-address", "127.0.0.1:1", "--poll", "0.1")
    bearer = {"authorization": f"Bearer {TOKEN}"}
    login = urllib.request.Request(f"{service.url}/login", data=f"token={TOKEN}".encode())
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    with opener.open(login, timeout=PATIENCE_S) as page:
        assert page.status == 200
    for path in ("/api/v1/status", f"/api/v1/trace?id={TOKEN}", f"/{TOKEN}"):
        request = urllib.request.Request(f"{service.url}{path}", headers=bearer)
        with contextlib.suppress(urllib.error.HTTPError):
            opener.open(request, timeout=PATIENCE_S).close()
    with pytest.raises(urllib.error.HTTPError):
        post(service.url, {}, authorization=f"Bearer {TOKEN}x")
    assert post(service.url, {}, **bearer) == 200
    _, _, written = service.stop(signal.SIGTERM)
    assert "data_plane_not_reached" in written  # it does write something
    assert TOKEN not in written
    for file in tmp_path.glob("*.sqlite*"):
        assert TOKEN.encode() not in file.read_bytes()


def test_the_file_is_where_it_was_asked_for(start, refused, tmp_path):
    start("--db", "here.sqlite").stop(signal.SIGTERM)
    assert (tmp_path / "here.sqlite").stat().st_mode & 0o077 == 0
    for asked, said in (
        (["--db", "no/folder/x.sqlite"], "no folder"),
        (["--allowed-origin", "x"], "expected a scheme"),
    ):
        status, told = refused("--port", "0", *asked)
        assert (status, told.count("\n")) == (1, 1)
        assert said in told
