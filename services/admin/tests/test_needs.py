"""What a task needs follows its newest claim."""

from types import SimpleNamespace

from dataplane_admin.answers.needs import Needs


class Told:
    """A store that tells of claims; each adds a revision."""

    def __init__(self):
        self.revision = 0
        self._claims = []

    def claim(self, task, fields):
        told = {"partition": "train", "task": task, "fields": fields}
        attributes = {f"dataplane.{name}": value for name, value in told.items()}
        self._claims.append(SimpleNamespace(attributes=attributes))
        self.revision += 1

    def newest_claims(self, event_id, most):
        return self._claims[event_id:], len(self._claims)


def test_a_task_that_claims_with_other_fields_needs_those():
    store = Told()
    needs = Needs(store)
    store.claim("train", ["input_ids"])
    needs.refresh()
    assert needs.of("train", "train") == ("input_ids",)
    store.claim("train", ["input_ids", "advantages"])
    needs.refresh()
    assert needs.of("train", "train") == ("input_ids", "advantages")
    assert needs.of("train", "other") is None
