"""Checks of the keys of the vLLM backend."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from grpo_trainer.config.sections import RefitSection, VllmSection

_OWN_OPTIONS = (
    "--model",
    "--host",
    "--port",
    "--max-model-len",
    "--generation-config",
    "--logprobs-mode",
    "--weight-transfer-config",
    "--worker-extension-cls",
    "--otlp-traces-endpoint",
)
"""Options that the trainer sets on each server."""


def vllm_problems(
    section: VllmSection, *, refit: RefitSection, call_timeout_s: float
) -> Iterator[str]:
    """Yield the problems of vLLM's keys, each with the key's name."""
    key = "policy.generation"
    if bool(section.addresses) == bool(section.servers):
        yield (
            f"{key}.servers: found {section.servers} with {len(section.addresses)} "
            f"{key}.addresses; expected addresses of running servers, or a number to start"
        )
    yield from _address_problems(section, refit)
    if section.servers and not section.command:
        yield f"{key}.command: found []; expected the command that starts a server"
    for word in section.arguments:
        option = word.partition("=")[0].replace("_", "-")
        if option in _OWN_OPTIONS:
            yield f"{key}.arguments: found {word!r}; the trainer sets that option"
    if section.num_gpus and section.addresses:
        yield f"{key}.num_gpus: found {section.num_gpus:g}; expected 0 with {key}.addresses"
    if section.num_gpus > 1 and section.servers and section.num_gpus % section.servers:
        yield (
            f"{key}.num_gpus: found {section.num_gpus:g}; expected a multiple of {key}.servers "
            f"{section.servers}"
        )
    if section.start_timeout_s >= call_timeout_s:
        yield (
            f"{key}.start_timeout_s: found {section.start_timeout_s:g}; expected less than "
            f"cluster.call_timeout_s {call_timeout_s:g}"
        )
    if refit.generation_tensor_parallel != 1:
        yield (
            f"refit.generation_tensor_parallel: found {refit.generation_tensor_parallel}; "
            f"expected 1 with {key}.backend 'vllm'"
        )


def _address_problems(section: VllmSection, refit: RefitSection) -> Iterator[str]:
    key = "policy.generation.addresses"
    for address in section.addresses:
        host = _host(address)
        if host is None:
            yield f"{key}: found {address!r}; expected http[s]://host[:port]"
        elif _is_loopback(refit.host) and not _is_loopback(host):
            yield (
                f"refit.host: {refit.host} is reachable from one machine only, and "
                f"{address} of {key} may be on another; set refit.host to 'node'"
            )
    if len(set(section.addresses)) < len(section.addresses):
        yield f"{key}: found a duplicate in {section.addresses}; expected each once"


def _host(address: str) -> str | None:
    """Return the host of an address, None if the address is malformed."""
    try:
        parts = urlsplit(address)
        good = parts.scheme in ("http", "https") and parts.port != 0 and parts.username is None
    except ValueError:  # the port is invalid
        return None
    rest = parts.path.strip("/") or parts.query or parts.fragment
    return parts.hostname if good and not rest else None


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")
