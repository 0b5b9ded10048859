"""Requirements of the vLLM backend are checked before a run; servers get the run's options.

In a run only vLLM sees these options (`integration/vllm`), so these tests call `worker_arguments`.
So internals are imported.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from integration.ports import address_of, hold_port

import grpo_trainer
from grpo_trainer import DEMO_CONFIG, load_config
from grpo_trainer.actors.telemetry import TelemetrySettings
from grpo_trainer.errors import ConfigurationError
from grpo_trainer.rollout.vllm_options import worker_arguments

VLLM_DEMO = DEMO_CONFIG.with_name("demo-vllm.yaml")


def refusal(*overrides):
    with pytest.raises(ConfigurationError) as caught:
        grpo_trainer.train(load_config(VLLM_DEMO, overrides))
    return str(caught.value)


def test_a_missing_command_is_refused_before_the_run(tmp_path):
    message = refusal(f"policy.generation.command=[{tmp_path}/bin/python]")
    assert message.startswith(f"policy.generation.command: {tmp_path}/bin/python: ")


def test_an_address_without_a_listener_is_refused_before_the_run():
    with hold_port() as holder:
        address = f"http://{address_of(holder)}"
        message = refusal("policy.generation.servers=0", f"policy.generation.addresses=[{address}]")
    assert message.startswith(f"policy.generation.addresses: '{address}'")


def servers_of(*overrides, telemetry=None):
    config = load_config(VLLM_DEMO, overrides)
    return worker_arguments(
        config,
        config.policy.generation,
        model="a-model",
        pad_token_id=0,
        folder=Path("here"),
        telemetry=telemetry,
    )["servers"]


def test_servers_get_the_options_of_the_run(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    servers = servers_of()
    command = servers["command"]
    assert command[0] == str(tmp_path / ".venv-vllm/bin/python")
    options = {"--model": "a-model", "--max-model-len": "48", "--dtype": "float32"}
    assert {option: command[command.index(option) + 1] for option in options} == options
    assert "--otlp-traces-endpoint" not in command
    assert servers["environment"]["VLLM_TARGET_DEVICE"] == "cpu"
    assert servers["folder"] == str(tmp_path / "here")
    name = Path(sys.executable).name  # a program on PATH stays a name
    assert servers_of(f"policy.generation.command=[{name}]")["command"][0] == name


def test_servers_export_traces_where_the_run_does():
    servers = servers_of(telemetry=TelemetrySettings("demo/1", "http://127.0.0.1:4318/"))
    command = servers["command"]
    endpoint = command[command.index("--otlp-traces-endpoint") + 1]
    assert endpoint == "http://127.0.0.1:4318/v1/traces"
    assert servers["environment"]["OTEL_SERVICE_NAME"] == "vllm"


def test_servers_get_the_control_plane_s_credentials(tmp_path):
    access = (
        f"{{tls_ca: {tmp_path}/ca.pem, tls_name: refit, token_file: null, token_env: THE_TOKEN}}"
    )
    servers = servers_of("refit.control=refit:1", f"refit.control_access={access}")
    assert servers["environment"]["REFIT_MX_CONTROL_TLS_CA"] == f"{tmp_path}/ca.pem"
    assert servers["environment"]["REFIT_MX_CONTROL_TLS_NAME"] == "refit"
    assert servers["token_env"] == "THE_TOKEN"
