"""A fleet looks at the routes of its servers before it pauses any; only what is sure refuses."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from vllm_servers import StandIn

from refit_mx.errors import FleetError, RefitConfigError
from refit_mx.fleet.client import RefitFleet

START, UPDATE, FINISH = "/start_weight_update", "/update_weights", "/finish_weight_update"


class Answering:
    """A server that answers GET with the statuses of a test, and POST with 503."""

    def __init__(self, statuses):
        self.asked = asked = []

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *arguments):
                pass

            def do_GET(self):
                self.answer(statuses.get(self.path, statuses["else"]))

            def do_POST(self):
                self.answer(503)

            def answer(self, status):
                asked.append((self.command, self.path.partition("?")[0]))
                self.send_response(status)
                if 300 <= status < 400:
                    self.send_header("Location", "http://127.0.0.1:9/")
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"<>")

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def paused(self):
        return ("POST", "/pause") in self.asked

    def close(self):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def answering():
    made = []

    def make(**statuses):
        made.append(
            Answering({f"/{key}" if key != "else" else key: v for key, v in statuses.items()})
        )
        return made[-1]

    yield make
    for each in made:
        each.close()


def statuses(both, start, finish):
    return {"else": 404, UPDATE[1:]: both, START[1:]: start, FINISH[1:]: finish}


@pytest.mark.parametrize(
    ("start", "finish", "named"),
    [(404, 404, f"{START} and {FINISH}"), (405, 404, FINISH), (404, 401, START)],
)
def test_a_server_that_lacks_routes_is_named_and_none_is_paused(answering, start, finish, named):
    old = answering(**statuses(405, start, finish))
    new = answering(**statuses(405, 405, 405))
    with pytest.raises(RefitConfigError, match=f"{old.url} lacks {named}. .* None was paused"):
        RefitFleet([new.url, old.url], timeout_s=30).refit("v1")
    assert not new.paused
    assert not old.paused
    assert {method for method, _ in new.asked + old.asked} == {"GET"}


@pytest.mark.parametrize(
    "answers",
    [
        statuses(405, 405, 405),
        statuses(404, 404, 404),  # behind a prefix
        statuses(401, 401, 401),
        statuses(401, 404, 404),
        statuses(200, 404, 404),  # a gateway with pages of its own
        statuses(302, 302, 302),
        statuses(405, 401, 500),
    ],
)
def test_what_is_not_sure_refuses_nothing(answering, answers):
    server = answering(**answers)
    with pytest.raises(FleetError, match="/pause: 503"):
        RefitFleet([server.url], timeout_s=30).refit("v1")
    assert server.paused


def test_a_server_that_is_not_there_is_found_before_any_is_paused(answering):
    here, gone = answering(**statuses(405, 405, 405)), answering(**statuses(405, 405, 405))
    gone.close()
    fleet = RefitFleet([here.url, gone.url], timeout_s=30)
    with pytest.raises(FleetError) as caught:
        fleet.refit("v1")
    assert list(caught.value.failed) == [gone.url]
    assert not here.paused
    assert fleet.holds == {here.url: None}


def test_the_older_form_is_refused_while_it_serves():
    server = StandIn("--backend", "mx", "--generation", "old", "--config", '{"layers": 1}')
    try:
        with pytest.raises(RefitConfigError, match=f"lacks {START} and {FINISH}"):
            RefitFleet([server.ready().url], timeout_s=30).refit("v1")
        assert not server.state["pauses"]
    finally:
        server.kill()
