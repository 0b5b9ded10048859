"""Checks of this machine for the vLLM backend, and the arguments of its worker."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any  # Any: arguments that travel to an actor
from urllib.parse import quote, urlsplit

from grpo_trainer.actors.telemetry import TelemetrySettings
from grpo_trainer.config.loading import TrainerConfig
from grpo_trainer.config.sections import ControlAccessSection, VllmSection
from grpo_trainer.errors import ConfigurationError

_CONNECT_S = 5.0
_ANSWER_SHARE = 0.9
"""Fraction of a call's deadline that vLLM gets; vLLM's error then comes first and names servers."""


def check_vllm(config: TrainerConfig) -> None:
    """Check this machine for everything that the vLLM backend needs.

    Raises:
        ConfigurationError: a package of the extra ``vllm`` is missing; or, if the run starts its
            own Ray, an address does not accept connections or the command does not exist.
    """
    section = config.policy.generation
    if not isinstance(section, VllmSection):
        return
    if importlib.util.find_spec("httpx") is None:
        raise ConfigurationError(
            "policy.generation.backend: found 'vllm', and httpx is not installed; install "
            "grpo-trainer[vllm]"
        )
    # On another cluster the worker's machine must have the command, not this one.
    if section.servers and config.cluster.address is None:
        program = _program(section)
        if shutil.which(program) is None:
            raise ConfigurationError(
                f"policy.generation.command: {program}: no such program, or not executable; "
                "expected the Python of vLLM's environment (make vllm installs one)"
            )
    for address in section.addresses if config.cluster.address is None else ():
        parts = urlsplit(address)
        port = parts.port or {"http": 80, "https": 443}[parts.scheme]
        try:
            socket.create_connection((parts.hostname or "", port), timeout=_CONNECT_S).close()
        except OSError as error:
            raise ConfigurationError(f"policy.generation.addresses: {address!r}: {error}") from None


def _program(section: VllmSection) -> str:
    """Return the first word of the command; a path becomes absolute.

    Links are not resolved: a virtual environment's Python is a link.
    """
    program = section.command[0]
    return str(Path(program).absolute()) if os.sep in program else program


def worker_arguments(
    config: TrainerConfig,
    section: VllmSection,
    *,
    model: str,
    pad_token_id: int,
    folder: Path,
    telemetry: TelemetrySettings | None,
) -> dict[str, Any]:
    """Return the arguments of `grpo_trainer.rollout.vllm_worker.VllmWorker` for a run.

    ``section`` is the run's backend; the servers' logs go to ``folder``.
    """
    return {
        "addresses": section.addresses,
        "servers": {
            "command": [
                *(_program(section), *section.command[1:]),
                *_server_options(config, model, telemetry),
                *section.arguments,
            ]
            if section.servers
            else [],
            "count": section.servers,
            "environment": {
                **_control_environment(config.refit.control_access),
                **_trace_environment(telemetry),
                "VLLM_SERVER_DEV_MODE": "1",  # enables the routes of a refit
                "VLLM_HOST_IP": "127.0.0.1",  # the rendezvous of its processes
                **section.environment,
            },
            "token_env": config.refit.control_access.token_env,
            "folder": str(folder.absolute()),
            "start_timeout_s": section.start_timeout_s,
        },
        "generation": {
            "pad_token_id": pad_token_id,
            "max_total_sequence_length": config.policy.max_total_sequence_length,
            "max_new_tokens": section.max_new_tokens,
            "temperature": section.temperature,
            "seed": config.run.seed,
            "timeout_s": _ANSWER_SHARE * config.cluster.call_timeout_s,
            "max_requests_per_server": section.max_requests_per_server,
        },
    }


def _server_options(
    config: TrainerConfig, model: str, telemetry: TelemetrySettings | None
) -> list[str]:
    options = {
        "--model": model,
        "--max-model-len": str(config.policy.max_total_sequence_length),
        "--generation-config": "vllm",  # sampling defaults are the run's, not the model's
        "--logprobs-mode": "processed_logprobs",
        "--weight-transfer-config": '{"backend": "mx"}',
        "--worker-extension-cls": "refit_mx.engine.status.RefitStatus",
    }
    if telemetry is not None and telemetry.endpoint is not None:
        options["--otlp-traces-endpoint"] = f"{telemetry.endpoint.rstrip('/')}/v1/traces"
    flags = ["--enable-scale-out", "--disable-uvicorn-access-log"]
    return [*flags, *(word for option in options.items() for word in option)]


def _trace_environment(telemetry: TelemetrySettings | None) -> dict[str, str]:
    if telemetry is None:
        return {}
    return {
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "OTEL_SERVICE_NAME": "vllm",
        "OTEL_RESOURCE_ATTRIBUTES": f"rl.run_id={quote(telemetry.run_id)}",
    }


def _control_environment(access: ControlAccessSection) -> Mapping[str, str]:
    """Return the variables that `refit_mx.ControlAccess.from_environment` reads in a server."""
    values = {
        "REFIT_MX_CONTROL_TLS_CA": access.tls_ca and str(access.tls_ca.absolute()),
        "REFIT_MX_CONTROL_TLS_NAME": access.tls_name,
        "REFIT_MX_CONTROL_TOKEN_FILE": access.token_file and str(access.token_file.absolute()),
    }
    return {name: value for name, value in values.items() if value}
