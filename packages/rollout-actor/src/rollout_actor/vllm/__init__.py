"""A generation backend that uses vLLM's HTTP servers.

It needs the extra ``vllm``. vLLM itself is needed only by the servers.
"""

from __future__ import annotations

from rollout_actor.vllm.generation import VllmGeneration

__all__ = ["VllmGeneration"]
