"""The recipe "Refit vLLM servers from a torchrun program": its program runs with real servers."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import torch
from integration.recipes import blocks, torchrun
from integration.vllm.fleet_rig import call
from integration.vllm.server import VllmServer, start_server, wait_until_ready
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

OPTIONS = [
    *("--weight-transfer-config", '{"backend": "mx"}'),
    *("--worker-extension-cls", "refit_mx.engine.status.RefitStatus"),
    *("--max-model-len", "2048"),
    *("--dtype", "bfloat16"),
]
END = "dist.barrier()  # no rank exits"
SAVE = """
from safetensors.torch import save_file
trained = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
if rank == 0:
    save_file(trained, "trained.safetensors")
"""
PROMPT = list(range(40, 60))


def served(server: VllmServer) -> torch.Tensor:
    """Return a server's log-probability of each token of the prompt but the first."""
    body = {"prompt": PROMPT, "max_tokens": 1, "prompt_logprobs": 0}
    [choice] = call(server, "/v1/completions", body)["choices"]
    positions = zip(PROMPT[1:], choice["prompt_logprobs"][1:], strict=True)
    return torch.tensor([position[str(token)]["logprob"] for token, position in positions])


def computed(folder: Path, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the same of a model with these weights."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="bfloat16")
    model.load_state_dict(weights)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([PROMPT])).logits[0, :-1].float()
    return logits.log_softmax(-1)[range(len(PROMPT) - 1), PROMPT[1:]]


def test_servers_get_the_weights_of_every_step(tiny_model: Path, tmp_path: Path) -> None:
    program = blocks("refit-torchrun", "python").replace("lr=1e-3", "lr=2e-2")
    assert END in program
    (tmp_path / "train.py").write_text(program.replace(END, SAVE + END))
    servers = [start_server(tiny_model, tmp_path, *OPTIONS) for _ in range(2)]
    try:
        wait_until_ready(servers)
        launched = served(servers[0])
        with torchrun(2) as launcher:
            done = subprocess.run(
                [*launcher, "train.py"],
                cwd=tmp_path,
                env={
                    **os.environ,
                    "MODEL": str(tiny_model),
                    "SERVERS": ",".join(server.address for server in servers),
                },
                capture_output=True,
                text=True,
                timeout=240,
            )
        assert done.returncode == 0, done.stdout + done.stderr
        for step in range(3):
            assert f"step-{step}: 2 servers, paused " in done.stdout
        trained = computed(tiny_model, load_file(tmp_path / "trained.safetensors"))
        assert (trained - launched).abs().max() > 1
        for server in servers:
            assert call(server, "/weight_info", method="GET") == {"weight_version": "step-2"}
            torch.testing.assert_close(served(server), trained, atol=0.3, rtol=0)
    finally:
        for server in servers:
            server.close()
