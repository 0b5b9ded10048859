"""`ModelFence`: a model whose live weights are a mixture refuses to compute.

An engine is asked nothing before it serves, so the refusal is put where serving has to come by: the
model's own call, and ``compute_logits``, which vLLM calls for each step. The second is for captured
graphs, which are replayed without a call of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch import nn

from refit_mx.errors import FencedError

_LOGITS = "compute_logits"


class ModelFence:
    """Of one model; open at first.

    Args:
        model: this rank's.
        why: says why it must not serve.
    """

    def __init__(self, model: nn.Module, why: Callable[[], str]) -> None:
        self._model = model
        self._why = why
        self._open: Callable[[], None] | None = None

    def close(self) -> None:
        """Let the model refuse from here on. May be called again."""
        if self._open is not None:
            return
        # Any: the model is vLLM's. Another one may have put its own there before.
        model: Any = self._model
        had = _LOGITS in vars(model)
        before = vars(model).get(_LOGITS)
        hook = model.register_forward_pre_hook(self._refuse, prepend=True)
        if hasattr(model, _LOGITS):
            setattr(model, _LOGITS, self._refuse)

        def open_again() -> None:
            hook.remove()
            if had:
                setattr(model, _LOGITS, before)
            elif _LOGITS in vars(model):
                delattr(model, _LOGITS)

        self._open = open_again

    def open(self) -> None:
        """Let it compute again. May be called again."""
        found, self._open = self._open, None
        if found is not None:
            found()

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise FencedError(f"{self._why()}; the weights are a mixture, so nothing is computed")
