"""Forms that change the data plane: what each will do in words, and what it is to send."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pydantic import ValidationError

from dataplane_admin.answers import AnswerError, Answers, Refused, models
from dataplane_admin.pages import words
from dataplane_admin.pages.asked import Asked
from dataplane_admin.pages.links import Link, to
from observability.views.printable import printable

_Request = TypeVar("_Request", bound=models.Model)


@dataclass(frozen=True)
class Ask:
    """A question before something is changed.

    Attributes:
        what: what will happen, a sentence.
        numbers: what it will hit, as far as it is known.
        fields: names and values that the form sends along.
        option: name and words of a box to check.
    """

    title: str
    what: str
    action: Link
    button: str
    partition: str
    back: Link
    ids: Sequence[str] = ()
    numbers: Sequence[str] = ()
    fields: Sequence[tuple[str, str]] = ()
    option: tuple[str, str] | None = None


def ask(answers: Answers, name: str, asked: Asked) -> Ask:
    """The question of an action.

    Raises:
        AnswerError: something it needs was not given.
    """
    return _ASKED[name](answers, asked, asked.required("partition"))


def act(answers: Answers, name: str, asked: Asked, actor: str) -> models.ActionResult:
    """Do it.

    Raises:
        AnswerError: it was refused, or failed.
    """
    partition = asked.required("partition")
    confirm = asked.text("confirm")
    # A name with characters that cannot be typed is confirmed as it is shown.
    if confirm == printable(partition):
        confirm = partition
    if confirm != partition:
        raise Refused(
            f"the confirmation is '{printable(confirm[:80])}'; expected the name of the partition, "
            f"'{printable(partition)}'. Nothing was changed"
        )
    return _DONE[name](answers, asked, partition, actor)


def _ask_clear(answers: Answers, asked: Asked, partition: str) -> Ask:
    ids = asked.texts("ids")
    facts = _facts(answers, partition)
    shown = printable(partition)
    if ids:
        title = f"Clear {words.plural(len(ids), 'sample')}?"
        what = (
            f"{words.plural(len(ids), 'sample')} of partition '{shown}' will be dropped from the "
            "store, with every field of them. This cannot be undone."
        )
    else:
        title = f"Clear partition {shown}?"
        what = (
            f"Every sample of partition '{shown}' and its declaration will be dropped from the "
            "store. Claims and puts of a run that goes on will fail. This cannot be undone."
        )
    numbers = []
    if facts and not ids:
        numbers.append(f"{words.plural(facts.present, 'sample')} are there now")
        if facts.nbytes is not None:
            numbers.append(f"{words.size(facts.nbytes)} are held")
        leased = sum(task.leased for task in facts.tasks)
        if leased:
            numbers.append(f"{words.count(leased)} are held by tasks under a lease")
    return Ask(
        title=title,
        what=what,
        action=Link("/actions/clear"),
        button="Clear them" if ids else "Clear the partition",
        partition=partition,
        back=to("/partition", id=partition),
        ids=ids,
        numbers=numbers,
        fields=_sent(ids),
        option=("force", "Also what a task holds under a lease"),
    )


def _ask_reset(_answers: Answers, asked: Asked, partition: str) -> Ask:
    ids = asked.texts("ids")
    task = asked.required("task")
    if not ids:
        raise Refused("no sample was chosen; check those that the task shall claim again")
    return Ask(
        title=f"Let {printable(task)} claim {words.plural(len(ids), 'sample')} again?",
        what=(
            f"{words.plural(len(ids), 'sample')} of partition '{printable(partition)}' that task "
            f"'{printable(task)}' has consumed can be claimed by it again, so it may train on "
            "them, or write them, twice."
        ),
        action=Link("/actions/reset-consumption"),
        button="Let them be claimed again",
        partition=partition,
        back=to("/partition", id=partition),
        ids=ids,
        fields=[("task", task), *_sent(ids)],
    )


def _ask_end(answers: Answers, asked: Asked, partition: str) -> Ask:
    name = asked.required("claim")
    held = next((one for one in answers.partition_claims(partition) if one.claim == name), None)
    numbers = []
    if held:
        numbers.append(f"task {printable(held.task)} of {printable(held.owner) or 'nobody known'}")
        numbers.append(f"{words.plural(held.samples, 'sample')}, held for {words.ago(held.age_s)}")
    return Ask(
        title="End a claim?",
        what=(
            f"Claim '{printable(name)}' of partition '{printable(partition)}' will end as if its "
            "lease had run out: its samples can be claimed again, and its holder's "
            "acknowledgement will be refused."
        ),
        action=Link("/actions/end-claim"),
        button="End the claim",
        partition=partition,
        back=to("/partition", id=partition),
        numbers=numbers,
        fields=[("claim", name)],
        option=("running", "Even if its lease still runs"),
    )


def _sent(ids: Sequence[str]) -> list[tuple[str, str]]:
    """Ids as one field of a form: fields are few, and line breaks in ids survive so."""
    return [("samples", json.dumps(ids))] if ids else []


def _ids(asked: Asked) -> list[str]:
    """The ids of `_sent`; none at all must never be taken for the whole partition by mistake."""
    told = asked.text("samples")
    if not told:
        return []
    try:
        ids = json.loads(told)
    except ValueError:
        ids = None
    if not isinstance(ids, list) or not ids or not all(isinstance(one, str) for one in ids):
        raise Refused("the form's list of samples cannot be read; expected a list of ids as JSON")
    return ids


def _facts(answers: Answers, partition: str) -> models.Partition | None:
    try:
        return answers.partition(partition)
    except AnswerError:
        return None


def _checked(make: Callable[[], _Request]) -> _Request:
    """A request's model.

    Raises:
        Refused: it is outside of what the model takes, too many ids for example.
    """
    try:
        return make()
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise Refused(f"{place}: {first['msg']}. Nothing was changed") from None


def _clear(answers: Answers, asked: Asked, partition: str, actor: str) -> models.ActionResult:
    ids, force = _ids(asked) or None, asked.flag("force")
    request = _checked(
        lambda: models.ClearSamples(
            partition=partition, sample_ids=ids, force=force, confirm=partition
        )
    )
    return answers.clear(request, actor=actor)


def _reset(answers: Answers, asked: Asked, partition: str, actor: str) -> models.ActionResult:
    task, ids = asked.required("task"), _ids(asked)
    request = _checked(
        lambda: models.ResetConsumption(
            partition=partition, task=task, sample_ids=ids, confirm=partition
        )
    )
    return answers.reset_consumption(request, actor=actor)


def _end(answers: Answers, asked: Asked, partition: str, actor: str) -> models.ActionResult:
    claim, expired_only = asked.required("claim"), not asked.flag("running")
    request = _checked(
        lambda: models.EndClaim(
            partition=partition, claim=claim, expired_only=expired_only, confirm=partition
        )
    )
    return answers.end_claim(request, actor=actor)


_ASKED: dict[str, Callable[[Answers, Asked, str], Ask]] = {
    "clear": _ask_clear,
    "reset-consumption": _ask_reset,
    "end-claim": _ask_end,
}
_DONE: dict[str, Callable[[Answers, Asked, str, str], models.ActionResult]] = {
    "clear": _clear,
    "reset-consumption": _reset,
    "end-claim": _end,
}
