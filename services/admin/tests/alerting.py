"""Helpers of tests of alerts: rules in a file, and a real receiver of webhooks."""

import base64
import hashlib
import hmac
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import yaml
from waiting import until

from dataplane_admin import load_rules

KEY = bytes(range(32))
SECRET = f"whsec_{base64.b64encode(KEY).decode()}"


def rules_in(folder, *rules, webhooks=()):
    """Return the rules of a file; each webhook is a name and a URL."""
    secret = folder / "webhook-secret"
    secret.write_text(f"{SECRET}\n")
    path = folder / "alerts.yaml"
    receivers = [{"name": name, "url": url, "secret_file": str(secret)} for name, url in webhooks]
    path.write_text(yaml.safe_dump({"rules": list(rules), "webhooks": receivers}))
    return load_rules(path)


def rule(kind, bound, **more):
    bounded = {} if bound is None else {"bound": bound}
    return {"name": kind.replace("_", "-"), "kind": kind, **bounded, **more}


def raised(job):
    return [(alert["name"], alert["run_id"]) for alert in job.get("alerts")["raised"]]


def cleared(job):
    return [(alert["name"], alert["run_id"]) for alert in job.get("alerts")["cleared"]]


def evaluate(job):
    """Wait until the rules were evaluated with everything that was sent before."""
    for _ in range(2):  # the first may have started before the call
        before = job.get("alerts")["evaluated_ns"]
        until(lambda before=before: job.get("alerts")["evaluated_ns"] not in (None, before))


class Receiver:
    """A receiver of webhooks: answers with ``statuses`` in order, then with 204."""

    def __init__(self):
        self.statuses = []
        self.requests = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                receiver.requests.append((self.path, dict(self.headers), body))
                self.send_response(receiver.statuses.pop(0) if receiver.statuses else 204)
                self.send_header("location", f"{receiver.url}/elsewhere")
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def events(self):
        """Return type and run of each accepted request, after checking its signature."""
        return [(body["type"], body["data"]["run"]) for body in map(verified, self.requests)]

    def close(self):
        self.server.shutdown()
        self.server.server_close()


def verified(request):
    """Verify a request as docs/recipes/alerts.md says; return its body."""
    _, headers, body = request
    named = {name.lower(): value for name, value in headers.items()}
    signed = f"{named['webhook-id']}.{named['webhook-timestamp']}.".encode() + body
    digest = base64.b64encode(hmac.new(KEY, signed, hashlib.sha256).digest()).decode()
    assert hmac.compare_digest(named["webhook-signature"], f"v1,{digest}")
    return json.loads(body)
