"""`ModelFence`: makes a model refuse to compute while its live weights are a mixture.

vLLM does not ask an engine before it serves. So the fence is on the calls that serving needs: the
model's own call, and ``compute_logits``, which vLLM calls in each step. The latter covers captured
graphs, which are replayed without calling the model.

`gather_from_ranks` lets all ranks of a server know whether one failed. vLLM's executor raises at
the first rank that fails, and leaves the other ranks' answers unread. Later calls then read these
answers, and a server with a failed rank looks healthy. If all ranks raise, the first answer that
vLLM reads reports the failure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from refit_mx.errors import FencedError, RefitError

_LOGITS = "compute_logits"
_TEXT_BYTES = 4096  # longer texts are cut when the ranks exchange them


class ModelFence:
    """Fence of one model; open at first.

    ``reason`` returns why the model must not serve.
    """

    def __init__(self, model: nn.Module, reason: Callable[[], str]) -> None:
        self._model = model
        self._reason = reason
        self._reopen: Callable[[], None] | None = None

    def close(self) -> None:
        """Make the model refuse from now on. May be called again."""
        if self._reopen is not None:
            return
        # Any: the model is vLLM's. It may already have an attribute of this name.
        model: Any = self._model
        has_own = _LOGITS in vars(model)
        own = vars(model).get(_LOGITS)
        hook = model.register_forward_pre_hook(self._refuse, prepend=True)
        if hasattr(model, _LOGITS):
            setattr(model, _LOGITS, self._refuse)

        def open_again() -> None:
            hook.remove()
            if has_own:
                setattr(model, _LOGITS, own)
            elif _LOGITS in vars(model):
                delattr(model, _LOGITS)

        self._reopen = open_again

    def open(self) -> None:
        """Allow the model to compute again. May be called again."""
        reopen, self._reopen = self._reopen, None
        if reopen is not None:
            reopen()

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise FencedError(f"{self._reason()}; the weights are a mixture, so nothing is computed")


def gather_from_ranks(text: str, timeout_s: float) -> Sequence[str]:
    """Return the texts of all ranks of this vLLM server, in their order; collective.

    Only the first 4,096 bytes of a text are sent. The other ranks have ``timeout_s`` to call this;
    the exchange then has another ``timeout_s``.

    Raises:
        RefitError: a rank is gone or did not come in time. All ranks that did come raise, too.
    """
    from vllm.distributed.parallel_state import get_world_group

    group = get_world_group()
    if group.world_size == 1:
        return [text]
    own = torch.zeros(_TEXT_BYTES, dtype=torch.uint8)
    encoded = text.encode()[:_TEXT_BYTES]
    own[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8)
    texts = [torch.empty_like(own) for _ in range(group.world_size)]
    limit = timedelta(seconds=timeout_s)
    try:
        # The barrier names the missing ranks. A rank may still be lost after it, and torch would
        # wait for half an hour, so the exchange has a limit, too.
        dist.monitored_barrier(group.cpu_group, limit, wait_all_ranks=True)
        dist.all_gather(texts, own, group.cpu_group, async_op=True).wait(limit)
    except RuntimeError as error:
        raise RefitError(
            f"not all {group.world_size} ranks of this vLLM server answer; restart it: {error}"
        ) from error
    return [bytes(text.tolist()).rstrip(b"\0").decode(errors="ignore") for text in texts]
