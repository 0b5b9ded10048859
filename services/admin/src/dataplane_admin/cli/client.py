"""HTTP requests of the commands to a running service."""

from __future__ import annotations

from collections.abc import Mapping

import httpx

from observability.views import printable

_TIMEOUT_S = 30.0


class RequestError(Exception):
    """A failed request; the text is one line with the reason."""


class OptionError(RequestError):
    """A request that failed because an option or argument has a wrong value."""


def fetch(
    url: str,
    path: str,
    query: Mapping[str, str | int | float | None],
    *,
    token: str | None,
    body: object = None,
) -> str:
    """Return the body of the service's answer.

    Args:
        query: parameters; None values are omitted.
        token: bearer token, None if the service has none.
        body: JSON body of a POST; None for a GET.

    Raises:
        OptionError: ``url`` is not an HTTP URL, or the service refuses a value of the query.
        RequestError: the service is unreachable or refuses the request.
    """
    params = {name: value for name, value in query.items() if value is not None}
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    shown = printable(url)
    try:
        # Ignore the environment's proxies: the service runs in the cluster.
        with httpx.Client(timeout=_TIMEOUT_S, trust_env=False) as client:
            method = "GET" if body is None else "POST"
            address = f"{url.rstrip('/')}{path}"
            answer = client.request(method, address, params=params, headers=headers, json=body)
    except (httpx.InvalidURL, httpx.UnsupportedProtocol):
        raise OptionError(
            f"--url: found {shown!r}; expected a URL such as http://127.0.0.1:8080"
        ) from None
    except UnicodeEncodeError:
        raise RequestError("an argument is not valid UTF-8 text") from None
    except httpx.TimeoutException:
        raise RequestError(f"{shown}: no answer within {_TIMEOUT_S:g} s") from None
    except httpx.HTTPError as error:
        raise RequestError(
            f"{shown}: cannot be reached: {error}; start `dataplane-admin serve`, or set --url"
        ) from None
    if answer.status_code == 401:
        raise RequestError(f"{shown}: requires a token; set --token-file")
    if answer.status_code != 200:
        error_class = OptionError if answer.status_code in (400, 422) else RequestError
        raise error_class(f"{shown}: {_detail(answer)}")
    return answer.text


def _detail(answer: httpx.Response) -> str:
    try:
        detail = answer.json()["detail"]
    except (ValueError, TypeError, KeyError):
        detail = f"answered with status {answer.status_code}"
    return printable(str(detail)[:1_000])
