"""Questions to a running service over HTTP, for the commands."""

from __future__ import annotations

from collections.abc import Mapping

import httpx

from observability.views import printable

_TIMEOUT_S = 30.0


class AskError(Exception):
    """There is no answer; the text is one line that says why."""


def ask(
    url: str, path: str, query: Mapping[str, str | int | float | None], *, token: str | None
) -> str:
    """The body of the service's answer.

    Args:
        url: of the service, ``http://127.0.0.1:8080``.
        path: what to ask.
        query: parameters; those that are None are left out.
        token: bearer token, None if the service has none.

    Raises:
        AskError: it cannot be reached, or refuses.
    """
    given = {name: value for name, value in query.items() if value is not None}
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    shown = printable(url)
    try:
        # A proxy of the environment has no part in asking a service beside a run.
        with httpx.Client(timeout=_TIMEOUT_S, trust_env=False) as client:
            answer = client.get(f"{url.rstrip('/')}{path}", params=given, headers=headers)
    except (httpx.InvalidURL, httpx.UnsupportedProtocol):
        raise AskError(
            f"--url: found {shown!r}; expected one such as http://127.0.0.1:8080"
        ) from None
    except UnicodeEncodeError:
        raise AskError("a value is no valid text in UTF-8 and cannot be asked for") from None
    except httpx.TimeoutException:
        raise AskError(f"{shown}: no answer within {_TIMEOUT_S:g} s") from None
    except httpx.HTTPError as error:
        raise AskError(f"{shown}: cannot be reached: {error}") from None
    if answer.status_code == 401:
        raise AskError(f"{shown}: asks for a token; give --token-file")
    if answer.status_code != 200:
        raise AskError(f"{shown}: {_detail(answer)}")
    return answer.text


def _detail(answer: httpx.Response) -> str:
    try:
        told = answer.json()
        detail = told["detail"]
    except (ValueError, TypeError, KeyError):
        detail = f"answered with status {answer.status_code}"
    return printable(str(detail)[:1_000])
