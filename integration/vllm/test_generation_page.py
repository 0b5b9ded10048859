"""The program of docs/rollout-actor.md runs against a real vLLM."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from integration.vllm.server import VllmServer

PAGE = Path(__file__).parents[2] / "docs" / "rollout-actor.md"


def test_program_of_the_page_runs(
    vllm_server: VllmServer, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = "\n".join(re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S))
    replacements = {
        "Qwen/Qwen3-0.6B": str(tiny_model),
        "http://127.0.0.1:8000": vllm_server.address,
    }
    for name, replacement in replacements.items():
        assert name in program
        program = program.replace(name, replacement)
    exec(compile(program, str(PAGE), "exec"), {"__name__": "__main__"})
    *responses, rate = capsys.readouterr().out.splitlines()
    assert responses
    assert float(rate) > 0
