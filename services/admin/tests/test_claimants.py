"""Who claims is asked of the store once, and known from then on."""

from dataplane_admin.answers.claimants import Claimants
from dataplane_admin.store import ClaimRow


class Told:
    """A store that tells of claims; each adds a revision."""

    def __init__(self):
        self.revision = 0
        self.asked = []
        self.complete = True
        self._claims = []

    def claim(self, partition, task):
        self._claims.append((partition, task))
        self.revision += 1

    def claimants(self, partition):
        self.asked.append(partition)
        return {task for where, task in self._claims if where == partition}

    def newest_claims(self, event_id, most):
        claims = [ClaimRow(*one, True, None) for one in self._claims[event_id:]]
        return claims if self.complete else [], len(self._claims), self.complete


def test_a_partition_is_asked_for_once_however_often_the_answer_is_no():
    store = Told()
    store.claim("train", "claims")
    known = Claimants(store)
    for _ in range(5):
        assert not known.has_claimed("train", "by_key")
        assert not known.has_claimed("val", "by_key")
        assert known.has_claimed("train", "claims")
    assert store.asked == ["train", "val"]


def test_a_task_that_claims_later_is_known_to():
    store = Told()
    known = Claimants(store)
    assert not known.has_claimed("train", "late")
    store.claim("train", "late")
    assert known.has_claimed("train", "late")
    assert store.asked == ["train"]


def test_what_was_passed_over_is_asked_for_anew():
    store = Told()
    known = Claimants(store)
    assert not known.has_claimed("train", "late")
    store.claim("train", "late")
    store.complete = False
    assert known.has_claimed("train", "late")
