"""What a task needs follows its newest claim."""

import pytest

from dataplane_admin.answers.needs import Needs
from dataplane_admin.store import ClaimRow, StoreUnavailable
from dataplane_admin.store.texts import storable


class Told:
    """A store that tells of claims; each adds a revision."""

    def __init__(self):
        self.revision = 0
        self.away = False
        self._claims = []

    def claim(self, task, fields):
        self._claims.append(ClaimRow("train", storable(task), True, fields))
        self.revision += 1

    def newest_claims(self, event_id, most):
        if self.away:
            raise StoreUnavailable("away")
        return self._claims[event_id:], len(self._claims), True


def test_a_task_that_claims_with_other_fields_needs_those():
    store = Told()
    needs = Needs(store)
    store.claim("train", ("input_ids",))
    needs.refresh()
    assert needs.of("train", "train") == ("input_ids",)
    store.claim("train", ("input_ids", "advantages"))
    store.claim("train", None)
    needs.refresh()
    assert needs.of("train", "train") == ("input_ids", "advantages")
    assert needs.of("train", "other") is None


@pytest.mark.parametrize("task", ["train\0", "t" * 600])
def test_a_task_is_found_by_its_own_name_whatever_it_is(task):
    store = Told()
    needs = Needs(store)
    store.claim(task, ("input_ids",))
    needs.refresh()
    assert needs.of("train", task) == ("input_ids",)


def test_what_could_not_be_read_is_read_the_next_time():
    store = Told()
    needs = Needs(store)
    store.claim("train", ("input_ids",))
    store.away = True
    with pytest.raises(StoreUnavailable):
        needs.refresh()
    store.away = False
    needs.refresh()
    assert needs.of("train", "train") == ("input_ids",)
