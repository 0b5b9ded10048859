"""Actions ask for confirmation, describe their effect, and need the page's form."""

import json
import re

import pytest
from made_up_traces import HOSTILE_PARTITION, REVERSED

SAME_ORIGIN = {"origin": "http://localhost"}


@pytest.fixture
def done(site):
    site.plane.done.clear()
    return site.plane.done


def hidden(page):
    fields = re.findall(r'<input type="hidden" name="([^"]+)" value="([^"]*)"', page)
    unescaped = [
        (name, value.replace("&#34;", '"').replace("&amp;", "&")) for name, value in fields
    ]
    return dict(unescaped)


def test_a_confirmation_describes_the_action(client):
    page = client.get("/actions/clear?partition=train").text
    assert "Clear partition train?" in page
    assert "480 samples present" in page
    assert "32 leased by tasks" in page
    assert "Type the partition name to confirm" in page


def test_a_confirmed_clear_reaches_the_data_plane_with_its_ids(client, done):
    page = client.get(f"/actions/clear?partition=train&ids=a%0Ab&ids={REVERSED}").text
    sent = hidden(page) | {"confirm": "train", "force": "true"}
    assert json.loads(sent["samples"]) == ["a\nb", REVERSED]
    answer = client.post("/actions/clear", data=sent, headers=SAME_ORIGIN)
    assert answer.status_code == 200
    assert "samples of partition &#39;train&#39; cleared: 2" in answer.text
    assert done == [("clear", "train", ["a\nb", REVERSED], True)]
    assert "anonymous from testclient" in client.get("/audit").text


def test_a_clear_of_selected_samples_needs_one(client):
    form = client.get("/partition?id=train").text.partition('id="pick"')[2].partition("</form>")[0]
    [(name, value)] = re.findall(r'name="(\w+)" value="(\w+)">Clear selected', form)
    answer = client.get("/actions/clear", params={"partition": "train", name: value})
    assert answer.status_code == 422
    assert "No sample selected" in answer.text
    page = client.get("/actions/clear", params={"partition": "train", name: value, "ids": "a"})
    assert "Clear 1 sample?" in page.text


def test_a_wrong_confirmation_changes_nothing(client, done):
    sent = hidden(client.get("/actions/clear?partition=train").text) | {"confirm": "trian"}
    answer = client.post("/actions/clear", data=sent, headers=SAME_ORIGIN)
    assert answer.status_code == 422
    assert "Nothing was changed" in answer.text
    assert done == []


def test_an_unreadable_id_list_never_clears_the_partition(client, done):
    sent = hidden(client.get("/actions/clear?partition=train&ids=a").text) | {"confirm": "train"}
    for broken in ("[", "[]", "{}", '["a", 1]', "[" * 100_000):
        answer = client.post("/actions/clear", data=sent | {"samples": broken}, headers=SAME_ORIGIN)
        assert answer.status_code == 422
    assert done == []


def test_an_untypable_name_is_confirmed_in_escaped_form(site, client, done):
    csrf = hidden(client.get("/actions/clear?partition=train").text)["csrf"]
    shown = HOSTILE_PARTITION.replace("\u202e", "\\u202e")
    sent = {"csrf": csrf, "partition": HOSTILE_PARTITION, "confirm": shown}
    assert client.post("/actions/clear", data=sent, headers=SAME_ORIGIN).status_code == 200
    assert done == [("clear", HOSTILE_PARTITION, None, False)]


def test_a_claim_is_ended_and_samples_are_redelivered(client, done):
    page = client.get("/actions/end-claim?partition=train&claim=train-01bc").text
    assert "8 samples for 10 min 40 s" in page
    client.post("/actions/end-claim", data=hidden(page) | {"confirm": "train"}, headers=SAME_ORIGIN)
    page = client.get("/actions/redeliver?partition=train&task=logprob&ids=x").text
    client.post("/actions/redeliver", data=hidden(page) | {"confirm": "train"}, headers=SAME_ORIGIN)
    assert done == [
        ("end-claim", "train", "train-01bc", True),
        ("redeliver", "train", "logprob", ["x"]),
    ]


def test_disabled_actions_are_not_offered(bare_client):
    assert bare_client.get("/actions/clear?partition=train").status_code == 404
    assert "/actions/" not in bare_client.get("/").text
