"""Facts and text of samples: stored, filtered, grouped, and text only on request."""

import json
import os
import re

import pytest
from sqlalchemy import create_engine
from sqlalchemy import text as text_of_sql
from waiting import until

from dataplane_admin import Retention

MAX_CONTENT, MAX_TOKENS = 32_768, 4_096
HOSTILE = "<img src=x onerror=alert(1)>"


def record(otlp, name, body, **facts):
    data = otlp.log("x", **facts)
    [item] = data.resource_logs[0].scope_logs[0].log_records
    item.event_name, item.body.string_value = name, json.dumps(body)
    return data


def facts(otlp, ids=("a", "b", HOSTILE), **more):
    columns = {
        "group": ["g", "g", "h"],
        "reward": [1.0, 0.0, None],
        "length": [10, 20, None],
        "truncated": [False, True, None],
    }
    return record(otlp, "rl.sample.facts", {"ids": list(ids), **columns}, **more)


def text(otlp):
    tokens = {"text": ["x", HOSTILE], "generator": [-0.12345678, -0.1], "trainer": [-0.1, -2.0]}
    turns = [{"role": "user", "content": HOSTILE}]
    return record(otlp, "rl.sample.text", {"id": "a", "turns": turns, "tokens": tokens})


def test_redacted_matches_are_not_stored(job_of, otlp):
    job = job_of(keep_sample_text=True, redact=(re.compile(r"sk-\w+"),))
    texts = ["my ", "key sk", "-", "abc", " end"]
    turns = [{"role": "user", "content": "".join(texts)}]
    body = {"id": "a", "turns": turns, "tokens": {"text": texts}}
    spans = otlp.trace()
    [root] = spans.resource_spans[0].scope_spans[0].spans
    root.attributes.add(key="gen_ai.prompt").value.string_value = "sk-abc and sk-def"
    root.name = root.events.add().name = "ask sk-abc"
    tagged = {"ids": ["a"], "tags": [{"note": "of sk-abc", "sk-abc": 1}]}
    job.send(record(otlp, "rl.sample.facts", tagged), record(otlp, "rl.sample.text", body), spans)
    content = job.get("sample/content", id="a", run="run")
    assert content["turns"][0]["content"] == "my key [redacted] end"
    shown = [token["text"] for token in content["tokens"]]
    assert shown == ["my ", "[redacted]", "[redacted]", "[redacted]", " end"]
    assert content["facts"]["tags"] == {"note": "of [redacted]", "[redacted]": "1"}
    [trace] = job.get("traces")["traces"]
    rows = json.dumps(job.get("trace", id=trace["trace_id"]))
    assert "[redacted] and [redacted]" in rows
    assert rows.count("ask [redacted]") > 1
    assert "sk-" not in rows


def test_a_match_across_the_maximum_length_is_redacted(job_of, otlp):
    job = job_of(keep_sample_text=True, redact=(re.compile(r"sk-\w+"),))
    before = "x" * (MAX_CONTENT - 5)
    tokens = ["y"] * (MAX_TOKENS - 1) + ["sk-abc", "def"]
    body = {
        "id": "a",
        "tokens": {"text": tokens},
        "tokens_omitted": 903,
    }
    turns = [{"role": "user", "content": before + "sk-abcdef"}]
    long = {"id": "b", "turns": turns, "tokens": {"text": tokens}}
    job.send(record(otlp, "rl.sample.text", body), record(otlp, "rl.sample.text", long))
    content = job.get("sample/content", id="a", run="run")
    assert content["tokens_omitted"] == 904
    assert "904 later tokens not recorded" in job.client.get("/sample?id=a&run=run").text
    assert [token["text"] for token in content["tokens"]] == [*tokens[:-2], "[redacted]"]
    content = job.get("sample/content", id="b", run="run")
    assert content["turns"][0]["content"] == before + "[reda"


@pytest.mark.parametrize(
    ("texts", "shown"),
    [
        (["<user>", "pin ", "12", "34", "</user>"], ["<user>", *["[redacted]"] * 3, "</user>"]),
        # A turn with a match is not in the text of the tokens: no token is shown.
        (["<user>", "pin", "12", "34", "</user>"], ["[redacted]"] * 5),
        (["<user>", "pin ", "12"], ["[redacted]"] * 3),
    ],
)
def test_tokens_of_a_redacted_turn_are_not_shown(job_of, otlp, texts, shown):
    job = job_of(keep_sample_text=True, redact=(re.compile(r"^pin \d+$"),))
    turns = [{"role": "user", "content": "pin 1234"}, {"role": "user", "content": "other"}]
    body = {"id": "a", "turns": turns, "tokens": {"text": texts}}
    job.send(record(otlp, "rl.sample.text", body))
    content = job.get("sample/content", id="a", run="run")
    assert content["turns"][0]["content"] == "[redacted]"
    assert [token["text"] for token in content["tokens"]] == shown


def test_redaction_leaves_identifying_attributes(job_of, otlp):
    job = job_of(keep_sample_text=True, redact=(re.compile(r"[a-z]+"),))
    spans = otlp.trace()
    spans.resource_spans[0].scope_spans[0].scope.name = "rl-dataplane"
    curves = [otlp.curve([1.0], name="rl.x", **{"rl.component": name}) for name in ("a", "b")]
    job.send(spans, *curves)
    [trace] = job.get("traces")["traces"]
    assert (trace["run_id"], trace["name"]) == ("run", "grpo.step")
    shown = job.get("runs/curves", run="run")["curves"]
    assert [curve["attributes"]["rl.component"] for curve in shown] == ["a", "b"]


def test_texts_are_deleted_before_facts(job_of, otlp, later):
    job = job_of(keep_sample_text=True, retention=Retention(max_text_age_s=3_600))
    job.send(facts(otlp), text(otlp))
    assert job.get("sample/content", id="a", run="run")["tokens"]
    later(3_700)
    # Retention runs while nothing is written.
    until(lambda: not job.get("sample/content", id="a", run="run")["tokens"])
    content = job.get("sample/content", id="a", run="run")
    assert (content["facts"]["reward"], content["turns"], content["tokens"]) == (1.0, [], [])


def test_a_full_store_deletes_older_texts_first(job_of, otlp):
    job = job_of(keep_sample_text=True, retention=Retention(max_bytes=4_000_000))
    job.send(otlp.trace(), otlp.curve([1.0]))
    ids = [f"s{number:04}" for number in range(1_400)]
    for first in range(0, len(ids), 200):
        turns = [{"role": "user", "content": os.urandom(2_000).hex()}]
        bodies = [{"id": name, "turns": turns} for name in ids[first : first + 200]]
        job.send(*(record(otlp, "rl.sample.text", body) for body in bodies))

    def has_text(name):
        return bool(job.get("sample/content", id=name, run="run")["turns"])

    until(lambda: not has_text(ids[0]))
    assert has_text(ids[-1])
    assert len(job.get("traces")["traces"]) == 1
    assert len(job.get("runs/curves", run="run")["curves"]) == 1


def test_groups_are_deleted_with_their_last_facts(job_of, url, otlp, later):
    job = job_of(store_url=url, retention=Retention(max_age_s=3_600))
    job.send(facts(otlp))
    later(3_700)
    until(lambda: not ids(job))
    with create_engine(url).connect() as connection:
        assert connection.scalar(text_of_sql("SELECT count(*) FROM sample_groups")) == 0


def test_generation_version_is_that_of_the_facts(job, otlp):
    job.send(otlp.log("put", ["a"], at_s=0, version=2), otlp.log("trained", ["a"], version=6))
    job.send(record(otlp, "rl.sample.facts", {"ids": ["a"], "first_version": [5]}))
    assert "1 version stale" in job.client.get("/sample?id=a&run=run").text


def ids(job, **query):
    return [each["sample_id"] for each in job.get("samples/facts", **query)["samples"]]


def test_facts_are_listed_newest_first_and_filtered(job, otlp):
    job.send(facts(otlp, step=3))
    assert ids(job) == [HOSTILE, "b", "a"]
    assert ids(job, sort="reward") == ["a", "b"]
    assert ids(job, min_reward=0.5, step=3) == ["a"]
    assert ids(job, max_reward=0.5) == ["b"]
    assert ids(job, min_length=20) == ["b"]
    assert ids(job, max_length=10) == ["a"]
    assert ids(job, truncated=True) == ["b"]
    assert [
        each["sample_id"] for each in job.get("samples/group", run="run", group="g")["samples"]
    ] == [
        "a",
        "b",
    ]
    first = job.get("samples/facts", limit=2)
    assert ids(job, limit=2, cursor=first["next"]) == ["a"]
    page = job.client.get("/samples").text
    assert HOSTILE not in page
    assert "&lt;img" in page


def test_samples_without_a_run_have_a_page_and_a_group(job, otlp):
    data = record(otlp, "rl.sample.facts", {"ids": ["a"], "group": ["g"], "reward": [0.5]}, run="")
    job.send(data)
    [listed] = job.get("samples/facts")["samples"]
    for query in ({}, {"run": listed["run_id"]}):
        assert job.get("sample/content", id="a", **query)["facts"]["reward"] == 0.5
    assert len(job.get("samples/group", run="", group="g")["samples"]) == 1
    page = job.client.get("/samples").text
    links = re.findall(r'href="(/(?:sample|group)[?][^"]+)"', page)
    assert len(links) == 2
    for link in links:
        assert job.client.get(link.replace("&amp;", "&")).status_code == 200


def test_a_number_too_large_for_a_float_is_unknown(job, otlp):
    body = {"ids": ["a", "b"], "reward": [10**400, 1.0], "length": [10**400, 2]}
    job.send(record(otlp, "rl.sample.facts", body))
    assert ids(job) == ["b", "a"]
    assert ids(job, sort="reward") == ids(job, sort="length") == ["b"]


def test_ids_are_unchanged_whatever_their_group(job, otlp):
    sent = ["g", "gg", "g_1", "\x01g", "\x00", "other"]
    for time_s, groups in enumerate((["g"] * 6, ["", "gg", "g_1", "\x01", "g", "other"])):
        job.send(record(otlp, "rl.sample.facts", {"ids": sent, "group": groups}, at_s=time_s))
        assert sorted(ids(job)) == sorted(sent)
    content = job.get("sample/content", id="gg")
    assert (content["facts"]["sample_id"], content["facts"]["group"]) == ("gg", "gg")


def test_facts_are_filtered_by_tag_in_any_case(job, otlp):
    tags = [{"source": "GSM8K", "level": 3}, {"source": "100%_\nmath", "new": True}, {"x": None}]
    job.send(
        record(otlp, "rl.sample.facts", {"ids": ["a", "b", "c"], "tags": tags}),
        record(otlp, "rl.sample.facts", {"ids": ["d", "e"], "tags": [None, ["source=GSM8K"]]}),
        record(otlp, "rl.sample.facts", {"ids": ["a"], "reward": [1.0]}, at_s=1),
    )
    for tag, expected in (
        ("source", ["b", "a"]),
        ("source=gsm8k", ["a"]),
        ("source=gsm", []),
        ("level=3", ["a"]),
        ("new=true", ["b"]),
        ("source=100%_\nmath", ["b"]),
        ("%", []),
        ("x", []),
    ):
        assert ids(job, tag=tag) == expected, tag
    listed = {each["sample_id"]: each["tags"] for each in job.get("samples/facts")["samples"]}
    assert listed["a"] == {"source": "GSM8K", "level": "3"}
    assert listed["b"] == {"source": "100%_ math", "new": "true"}
    page = job.client.get("/samples", params={"tagged": "source=gsm8k"}).text
    assert re.findall(r'<a class="id"[^>]*>(.)</a>', page) == ["a"]
    assert "level=3</a>" in page
    many = {f"tag{number:02}": HOSTILE * 50 for number in range(20)}
    job.send(record(otlp, "rl.sample.facts", {"ids": ["c"], "tags": [many]}))
    [stored] = [each["tags"] for each in job.get("samples/facts")["samples"][2:3]]
    assert len(stored) == 16
    assert {len(name) + 1 + len(value) for name, value in stored.items()} == {500}


def test_a_trained_event_sets_state_and_step_in_any_order(job, otlp):
    job.send(otlp.log("trained", ["a"], at_s=2, step=5))
    job.send(facts(otlp))
    [sample] = job.get("samples/facts", group="g", min_reward=0.5)["samples"]
    assert (sample["state"], sample["step"]) == ("trained", 5)


def test_states_of_the_shown_samples_are_offered(job, otlp):
    job.send(record(otlp, "rl.sample.facts", {"ids": ["a"], "state": [HOSTILE]}))
    page = job.client.get("/samples").text
    [states] = re.findall(r'<datalist id="states">(.*)</datalist>', page)
    offered = re.findall(r'value="([^"]*)"', states)
    assert offered == ["trained", "dropped", "&lt;img src=x onerror=alert(1)&gt;"]


def test_late_records_of_other_processes_replace_nothing_newer(job_of, otlp):
    job = job_of(keep_sample_text=True)
    arriving = [facts(otlp, at_s=1), record(otlp, "rl.sample.text", {"id": "a"}, at_s=3, step=5)]
    for request in (*arriving, otlp.log("trained", ["a"], at_s=2, step=5)):
        job.send(request)
    [sample] = job.get("samples/facts", min_reward=0.5)["samples"]
    assert (sample["state"], sample["step"]) == ("trained", 5)
    changed = record(otlp, "rl.sample.facts", {"ids": ["a"], "reward": [0.75]}, at_s=1.5)
    job.send(changed, facts(otlp, at_s=1.2))
    assert [each["reward"] for each in job.get("samples/facts", step=5)["samples"]] == [0.75]


@pytest.mark.parametrize("keep", [False, True])
def test_text_is_stored_only_on_request(job_of, otlp, keep):
    job = job_of(keep_sample_text=keep)
    job.send(facts(otlp), otlp.log("put", ["a"]), text(otlp))
    content = job.get("sample/content", id="a", run="run")
    assert len(content["tokens"]) == 2 * keep
    page = job.client.get("/sample?id=a&run=run&color=difference").text
    assert HOSTILE not in page
    assert ("Weight version" in page) == keep
    assert ids(job, text=True) == ["a"] * keep
    if keep:
        assert content["divergence"]["place"] == 1
        assert content["tokens"][0]["generator"] == -0.12346


def test_a_group_has_its_prompt_and_the_last_responses(job_of, otlp):
    job = job_of(keep_sample_text=True)
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "Call the tool."},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "2."},
    ]
    job.send(facts(otlp), record(otlp, "rl.sample.text", {"id": "b", "turns": turns}))
    group = job.get("samples/group", run="run", group="g")
    assert group["prompt"] == turns[:2]
    assert group["responses"] == [None, "2."]
    assert job.get("samples/group", run="run", group="h")["prompt"] == []
    job.send(facts(otlp, step=8, ids=["c", "d", "e"]))
    assert len(job.get("samples/group", run="run", group="g")["samples"]) == 4
    of_step = job.get("samples/group", run="run", group="g", step=8)["samples"]
    assert [sample["sample_id"] for sample in of_step] == ["c", "d"]
    assert "/group?run=run&amp;group=g&amp;step=8" in job.client.get("/samples?step=8").text
    page = job.client.get("/group?run=run&group=g").text
    assert page.index("Be brief.") < page.index("1 + 1?") < page.index("2.</p>")


def test_a_group_shows_up_to_4_mi_characters_of_text(job_of, otlp):
    job = job_of(keep_sample_text=True)
    names = [f"s{number:03}" for number in range(140)]
    job.send(record(otlp, "rl.sample.facts", {"ids": names, "group": ["g"] * len(names)}))
    response = {"role": "assistant", "content": "x" * MAX_CONTENT}
    job.send(*(record(otlp, "rl.sample.text", {"id": each, "turns": [response]}) for each in names))
    group = job.get("samples/group", run="run", group="g")
    assert [bool(each) for each in group["responses"]] == [True] * 128 + [False] * 12
    [note] = group["notes"]
    assert note.startswith("The text of 12 samples is left out")
    page = job.client.get("/group?run=run&group=g").text
    assert note in page
    assert page.count('class="response"') == 128


def test_a_group_reads_up_to_32_mib_of_text(job_of, otlp):
    job = job_of(keep_sample_text=True)
    names = [f"s{number}" for number in range(8)]
    job.send(record(otlp, "rl.sample.facts", {"ids": names, "group": ["g"] * len(names)}))
    given = [{"role": "user", "content": "x" * MAX_CONTENT}] * 199
    turns = [*given, {"role": "assistant", "content": "y"}]
    for name in names:
        job.send(record(otlp, "rl.sample.text", {"id": name, "turns": turns}))
    group = job.get("samples/group", run="run", group="g")
    assert group["responses"] == ["y"] * 6 + [None] * 2
    assert len(group["prompt"]) == 63
    assert [note.partition(" is left")[0].partition(" are left")[0] for note in group["notes"]] == [
        "136 later messages of the prompt",
        "The text of 2 samples",
    ]
    [*_, last] = job.get("sample/content", id=names[-1], run="run")["turns"]
    assert last["content"] == "y"


@pytest.mark.parametrize(
    ("cause", "likely", "evidence", "differences", "columns"),
    [
        (
            "Tokenization",
            True,
            "100 % of the tokens from this token on diverge, as if shifted; "
            "to check, compare the token ids of generator and trainer",
            [0.0, 0.0, 2.0, 2.0, 2.0],
            {},
        ),
        (
            "Tokenization",
            False,
            "33 % of the tokens from this token on diverge; "
            "the model did not generate the text before it, which the trainer may tokenize "
            "differently; "
            "to check, compare the token ids of generator and trainer",
            [0.0, 0.0, 2.0, 0.0, 0.0],
            {"mask": [1, 0, 1, 1, 1]},
        ),
        (
            "Weight version",
            True,
            "generated by weight version 2, scored by 3; the previous token has version 1",
            [0.0, 2.0, 0.0, 0.0],
            {"version": [1, 2, 2, 2]},
        ),
        (
            "Routed experts",
            False,
            "1 of 10 tokens diverge, and their routing is not recorded; in a mixture of experts, "
            "isolated tokens diverge if the trainer routes them to other experts; "
            "to check, replay the generator's routing",
            [0.0] * 5 + [2.0] + [0.0] * 4,
            {},
        ),
        (
            "Precision",
            True,
            "the other tokens differ by 0.1 nats on average; "
            "the difference of 0.6 nats at this token may be rounding",
            [0.1, 0.6, 0.1, 0.1],
            {},
        ),
    ],
)
def test_only_causes_with_evidence_are_likely(
    job_of, otlp, cause, likely, evidence, differences, columns
):
    count = len(differences)
    tokens = {
        "text": ["x"] * count,
        "generator": [-3.0] * count,
        "trainer": [-3.0 + difference for difference in differences],
        "mask": [1] * count,
        "version": [3] * count,
    }
    body = {"id": "a", "tokens": tokens | columns}
    job = job_of(keep_sample_text=True)
    job.send(record(otlp, "rl.sample.text", body, version=3))
    causes = job.get("sample/content", id="a", run="run")["divergence"]["causes"]
    assert {each["name"] for each in causes} == {
        "Tokenization",
        "Weight version",
        "Routed experts",
        "Precision",
    }
    assert {each["name"]: each["evidence"] for each in causes}[cause] == evidence
    assert [each["name"] for each in causes if each["likely"]] == [cause] * likely


@pytest.mark.parametrize(
    ("color", "expected"),
    [
        ("logprob", ["c0", "c1", "c2", "c3", "unknown"]),
        ("difference", ["c3", "c0", "c2", "c1", "unknown"]),
        ("mask", ["v1", "v1", "v1", "v1", "c0"]),
        ("version", ["v0", "v1", "v0", "v2", "unknown"]),
    ],
)
def test_tokens_are_colored_by_the_chosen_fact(job_of, otlp, color, expected):
    tokens = {
        "text": ["a", "b", "c", "d", "e"],
        "generator": [-0.05, -0.5, -2.0, -4.0, None],
        "trainer": [-0.65, -0.52, -1.7, -3.9, -5.0],
        "mask": [1, 1, 1, 1, 0],
        "version": [7, 8, 7, 9, None],
    }
    job = job_of(keep_sample_text=True)
    job.send(record(otlp, "rl.sample.text", {"id": "a", "tokens": tokens}))
    page = job.client.get(f"/sample?id=a&run=run&color={color}").text
    shown = re.findall(r'<span class="tok (\w+)[^>]*>(\w)</span>', page)
    assert shown == [*zip(expected, tokens["text"], strict=True)]
    assert ("</span>unknown</li>" in page) == ("unknown" in expected)


def test_a_sample_is_listed_with_facts_or_after_15_s(job, otlp, later):
    job.send(otlp.log("trained", ["a", "b"], step=5))
    assert job.get("samples/facts")["samples"] == []
    job.send(facts(otlp, ids=("a", "x", "y")))
    [*_, first] = job.get("samples/facts")["samples"]
    assert (first["sample_id"], first["reward"], first["state"]) == ("a", 1.0, "trained")
    later(16)
    listed = job.get("samples/facts")["samples"]
    assert {sample["sample_id"] for sample in listed} == {"a", "b", "x", "y"}
