"""Files of rules: a wrong one is refused at start, with the place of the problem."""

import pytest


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("rules: [{name: a, kind: no_stp, bound: 1}]", "rules.0.kind: found 'no_stp'"),
        ("rules: [{name: a, kind: no_step, bound: -1}]", "rules.0.bound: found '-1'"),
        ("rules: [{name: a, kind: no_step, bound: '9'}]", "rules.0.bound: found '9'"),
        ("rules: [{name: a, kind: no_step}]", "rules.0.bound: missing"),
        ("rules: [{name: a, kind: metric, metric: m}]", "expected metric, and either above or"),
        ("rules: [{name: a, kind: metric, above: 1}]", "expected metric, and either above or"),
        ("rules: [{name: a, kind: metric, metric: m, bound: 1}]", "the kind metric has none"),
        ("rules: [{name: a, kind: staleness, bound: 1, below: 1}]", "has no metric, above or"),
        ("rules: [{name: a, kind: not_finite, bound: 1}]", "kind not_finite has none"),
        ("rules: [{name: a, kind: store_full, bound: 2}]", "expected a fraction below 1"),
        ("rules: [{name: a, kind: staleness, bound: 1, rums: b}]", "rules.0.rums: unknown key"),
        (
            "rules: [{name: a, kind: staleness, bound: 1}, {name: a, kind: staleness, bound: 2}]",
            "the name 'a' is used twice",
        ),
        ("webhooks: [{name: a, url: 'file:///etc/passwd', secret_env: A}]", "expected http://"),
        ("webhooks: [{name: a, url: 'http://b'}]", "expected either secret_file or secret_env"),
        ("webhooks: [{name: a, url: 'http://b', secret_env: A}]", "webhook a: secret_env 'A'"),
        ("- a", "found list; expected a mapping"),
        ("a: [", "not valid YAML"),
    ],
)
def test_a_wrong_file_is_refused_at_start(refused, tmp_path, text, problem):
    (tmp_path / "alerts.yaml").write_text(text)
    status, errors = refused("--alert-rules", str(tmp_path / "alerts.yaml"))
    assert status == 2
    assert errors.startswith("dataplane-admin: --alert-rules: ")
    assert errors.count("\n") == 1
    assert problem in errors
