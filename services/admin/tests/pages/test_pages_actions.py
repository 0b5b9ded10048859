"""What changes the data plane asks first, names what will happen, and needs the page's own form."""

import json
import re

import pytest
from made_up_traces import HOSTILE_PARTITION, REVERSED

OURS = {"origin": "http://localhost"}


@pytest.fixture
def done(site):
    site.answers.done.clear()
    return site.answers.done


def hidden(page):
    found = re.findall(r'<input type="hidden" name="([^"]+)" value="([^"]*)"', page)
    unescaped = [(name, value.replace("&#34;", '"').replace("&amp;", "&")) for name, value in found]
    return dict(unescaped)


def test_a_question_names_what_will_happen(client):
    page = client.get("/actions/clear?partition=train").text
    assert "Clear partition train?" in page
    assert "480 samples are there now" in page
    assert "32 are held by tasks under a lease" in page
    assert "type the name of the partition" in page


def test_a_confirmed_clear_reaches_the_data_plane_with_its_ids(client, done):
    page = client.get(f"/actions/clear?partition=train&ids=a%0Ab&ids={REVERSED}").text
    sent = hidden(page) | {"confirm": "train", "force": "true"}
    assert json.loads(sent["samples"]) == ["a\nb", REVERSED]
    answer = client.post("/actions/clear", data=sent, headers=OURS)
    assert answer.status_code == 200
    assert "2 samples of partition" in answer.text
    [(action, asked, actor)] = done
    assert (action, asked.sample_ids, asked.force) == ("clear", ["a\nb", REVERSED], True)
    assert actor == "anybody from testclient"


def test_a_wrong_confirmation_changes_nothing(client, done):
    sent = hidden(client.get("/actions/clear?partition=train").text) | {"confirm": "trian"}
    answer = client.post("/actions/clear", data=sent, headers=OURS)
    assert answer.status_code == 422
    assert "Nothing was changed" in answer.text
    assert done == []


def test_a_form_of_nobody_is_refused(client, done):
    sent = {"partition": "train", "confirm": "train"}
    assert client.post("/actions/clear", data=sent, headers=OURS).status_code == 403
    assert (
        client.post("/actions/clear", data=sent | {"csrf": "guess"}, headers=OURS).status_code
        == 403
    )
    assert done == []


def test_a_list_of_ids_that_cannot_be_read_never_means_the_whole_partition(client, done):
    sent = hidden(client.get("/actions/clear?partition=train&ids=a").text) | {"confirm": "train"}
    for broken in ("[", "[]", "{}", '["a", 1]'):
        answer = client.post("/actions/clear", data=sent | {"samples": broken}, headers=OURS)
        assert answer.status_code == 422
    assert done == []


def test_a_name_that_cannot_be_typed_is_confirmed_as_it_is_shown(site, client, done):
    csrf = hidden(client.get("/actions/clear?partition=train").text)["csrf"]
    shown = HOSTILE_PARTITION.replace("\u202e", "\\u202e")
    sent = {"csrf": csrf, "partition": HOSTILE_PARTITION, "confirm": shown}
    assert client.post("/actions/clear", data=sent, headers=OURS).status_code == 200
    assert done[0][1].confirm == HOSTILE_PARTITION


def test_a_claim_and_a_consumption_can_be_ended(client, done):
    page = client.get("/actions/end-claim?partition=train&claim=train-01bc").text
    assert "8 samples, held for 10 min 40 s" in page
    client.post("/actions/end-claim", data=hidden(page) | {"confirm": "train"}, headers=OURS)
    page = client.get("/actions/reset-consumption?partition=train&task=logprob&ids=x").text
    client.post(
        "/actions/reset-consumption", data=hidden(page) | {"confirm": "train"}, headers=OURS
    )
    assert [one[0] for one in done] == ["end-claim", "reset-consumption"]
    assert done[0][1].expired_only is True
    assert done[1][1].sample_ids == ["x"]


def test_nothing_offers_actions_where_they_are_off(bare_client):
    assert bare_client.get("/actions/clear?partition=train").status_code == 404
    assert "/actions/" not in bare_client.get("/").text
