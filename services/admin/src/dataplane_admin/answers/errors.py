"""Questions that have no answer, each with the status that HTTP has for it."""

from __future__ import annotations


class AnswerError(Exception):
    """A question without an answer; its text is one sentence for the caller."""

    status = 500


class Refused(AnswerError):
    """What was asked is not possible as it was asked."""

    status = 422


class NotFound(AnswerError):
    """What was asked for is not there."""

    status = 404


class NotAllowed(AnswerError):
    """The service was not started to do this."""

    status = 404


class Conflict(AnswerError):
    """The data plane's state does not allow it now."""

    status = 409


class Unavailable(AnswerError):
    """A part that the answer needs is not there now."""

    status = 503


class Late(AnswerError):
    """The data plane did not answer in time."""

    status = 504
