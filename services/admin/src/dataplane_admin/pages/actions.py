"""Confirmation forms of the actions that change the data plane."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar  # Any: values of a form

from pydantic import ValidationError

from dataplane_admin import models
from dataplane_admin.pages import words
from dataplane_admin.pages.links import Link, to
from dataplane_admin.pages.params import Params
from dataplane_admin.service import AdminService, NotFound, Refused, ServiceError
from observability.views.printable import printable

_Request = TypeVar("_Request", bound=models.Model)


@dataclass(frozen=True)
class Confirmation:
    """The content of a confirmation page.

    Attributes:
        what: the effect of the action.
        numbers: what the action affects, as far as known.
        fields: names and values of the form's hidden fields.
        option: name and label of a checkbox.
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


def confirmation(service: AdminService, name: str, params: Params) -> Confirmation:
    """Return the confirmation page of an action.

    Raises ServiceError if there is no such action, or a required parameter is missing.
    """
    _check_name(name)
    return _CONFIRMATIONS[name](service, params, params.required("partition"))


def perform(service: AdminService, name: str, params: Params, actor: str) -> models.ActionResult:
    """Run a confirmed action.

    Raises ServiceError if there is no such action, or it was refused or failed.
    """
    _check_name(name)
    partition = params.required("partition")
    confirm = params.text("confirm")
    # Characters that cannot be typed are confirmed in their escaped form.
    if confirm == printable(partition):
        confirm = partition
    if confirm != partition:
        raise Refused(
            f"the confirmation is '{printable(confirm[:80])}'; expected the partition name "
            f"'{printable(partition)}'. Nothing was changed"
        )
    given: dict[str, Any] = {"partition": partition, "confirm": partition}
    if name == "clear":
        given |= {"sample_ids": _ids(params) or None, "force": params.flag("force")}
        return service.actions.clear(checked(models.ClearSamples, **given), actor)
    if name == "redeliver":
        given |= {"task": params.required("task"), "sample_ids": _ids(params)}
        return service.actions.redeliver(checked(models.RedeliverSamples, **given), actor)
    given |= {"claim": params.required("claim"), "expired_only": not params.flag("running")}
    return service.actions.end_claim(checked(models.EndClaim, **given), actor)


def _check_name(name: str) -> None:
    if name not in _CONFIRMATIONS:
        raise NotFound(f"action '{name}' does not exist")


def _confirm_clear(service: AdminService, params: Params, partition: str) -> Confirmation:
    ids = params.texts("ids")
    if not ids and params.flag("selected"):
        raise Refused("no sample selected; select the samples to clear")
    facts = _facts(service, partition)
    shown = printable(partition)
    if ids:
        title = f"Clear {words.plural(len(ids), 'sample')}?"
        what = (
            f"{words.plural(len(ids), 'sample')} of partition '{shown}' will be deleted, with all "
            "fields. This cannot be undone."
        )
    else:
        title = f"Clear partition {shown}?"
        what = (
            f"All samples of partition '{shown}' and its declaration will be deleted. Claims and "
            "puts of a running job will fail. This cannot be undone."
        )
    numbers = []
    if facts and not ids:
        numbers.append(f"{words.plural(facts.present, 'sample')} present")
        if facts.nbytes is not None:
            numbers.append(f"{words.size(facts.nbytes)} in the data plane")
        leased = sum(task.leased for task in facts.tasks)
        if leased:
            numbers.append(f"{words.count(leased)} leased by tasks")
    return Confirmation(
        title=title,
        what=what,
        action=Link("/actions/clear"),
        button="Clear samples" if ids else "Clear partition",
        partition=partition,
        back=to("/partition", id=partition),
        ids=ids,
        numbers=numbers,
        fields=_ids_field(ids),
        option=(
            "force",
            "Also clear leased samples. Without this, nothing is cleared while a task leases any "
            "of them",
        ),
    )


def _confirm_redelivery(_service: AdminService, params: Params, partition: str) -> Confirmation:
    ids = params.texts("ids")
    task = params.required("task")
    if not ids:
        raise Refused("no sample selected; select the samples to redeliver")
    pronoun = "it" if len(ids) == 1 else "them"
    return Confirmation(
        title=f"Redeliver {words.plural(len(ids), 'sample')} to {printable(task)}?",
        what=(
            f"Task '{printable(task)}' will be able to claim {words.plural(len(ids), 'sample')} of "
            f"partition '{printable(partition)}' again, and may process {pronoun} twice."
        ),
        action=Link("/actions/redeliver"),
        button="Redeliver",
        partition=partition,
        back=to("/partition", id=partition),
        ids=ids,
        fields=[("task", task), *_ids_field(ids)],
    )


def _confirm_end(service: AdminService, params: Params, partition: str) -> Confirmation:
    name = params.required("claim")
    claims = service.partition_claims(partition)
    claim = next((leased for leased in claims if leased.claim == name), None)
    numbers = []
    if claim:
        numbers.append(f"task {printable(claim.task)}")
        numbers.append(f"held by {printable(claim.owner) or 'an unknown process'}")
        numbers.append(f"{words.plural(claim.samples, 'sample')} for {words.ago(claim.age_s)}")
    return Confirmation(
        title="End claim?",
        what=(
            f"Claim '{printable(name)}' of partition '{printable(partition)}' will end. Its "
            "samples can then be claimed again, and its holder can no longer acknowledge them."
        ),
        action=Link("/actions/end-claim"),
        button="End claim",
        partition=partition,
        back=to("/partition", id=partition),
        numbers=numbers,
        fields=[("claim", name)],
        option=("running", "End the claim even if its lease has not expired"),
    )


def _ids_field(ids: Sequence[str]) -> list[tuple[str, str]]:
    """Return the ids as one JSON field: the number of fields is bounded, and ids may have line
    breaks."""
    return [("samples", json.dumps(ids))] if ids else []


def _ids(params: Params) -> list[str]:
    """Return the ids of `_ids_field`.

    Raises Refused if the list is invalid: without ids, the entire partition would be cleared.
    """
    text = params.text("samples")
    if not text:
        return []
    try:
        ids = json.loads(text)
    except (ValueError, RecursionError):
        ids = None
    if not isinstance(ids, list) or not ids or not all(isinstance(item, str) for item in ids):
        raise Refused("the form's list of samples is invalid; expected a JSON list of ids")
    return ids


def _facts(service: AdminService, partition: str) -> models.Partition | None:
    try:
        return service.partition(partition)
    except ServiceError:
        return None


def checked(model: type[_Request], **values: Any) -> _Request:
    """Return a request with these values.

    Raises Refused if the model rejects a value, such as too many ids.
    """
    try:
        return model(**values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise Refused(f"{place}: {first['msg']}. Nothing was changed") from None


_CONFIRMATIONS: dict[str, Callable[[AdminService, Params, str], Confirmation]] = {
    "clear": _confirm_clear,
    "redeliver": _confirm_redelivery,
    "end-claim": _confirm_end,
}
