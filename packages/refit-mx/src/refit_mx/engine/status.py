"""`RefitStatus`: the state of each rank of a vLLM server, for the client that updates it.

vLLM adds the class to its workers with the option
``--worker-extension-cls refit_mx.engine.status.RefitStatus``. Another class may inherit from it.
"""

from __future__ import annotations

from typing import Any


class RefitStatus:
    """Worker extension with a method for vLLM's ``collective_rpc``."""

    def refit_status(self, nonce: str = "") -> dict[str, Any]:
        """Return the state of this rank's weights and fetch, in JSON types, without waiting.

        Never raises.

        Args:
            nonce: value to return. It distinguishes the answers to this call from those to earlier
                calls, which vLLM leaves unread if a call fails.

        Returns:
            ``vllm``: version of vLLM. ``backend``: ``mx``, another engine's class, or None.
            ``session``: whether vLLM's session from ``start`` to ``finish`` is open.
            ``rank``: rank of this worker in its server.
            ``initialized``: whether it is connected to a control plane.
            ``version_id``: version of the live weights; None for those of the launch.
            ``fenced``: why it must not serve; None if it may.
            ``error``: error of the last call, if ``errors`` is ``status``.
            ``fetch``: None, or ``version_id``, ``state`` (``running``, ``received``, ``failed``),
            ``error``, ``retryable``, ``bytes``, and ``seconds`` by stage.
        """
        import vllm

        from refit_mx.engine.registration import BACKEND
        from refit_mx.engine.vllm import MxWeightTransferEngine

        # Any: vLLM's attributes of the worker.
        worker: Any = self
        engine = getattr(worker, "weight_transfer_engine", None)
        status: dict[str, Any] = {
            "nonce": nonce,
            "vllm": vllm.__version__,
            "backend": None if engine is None else type(engine).__name__,
            "session": bool(getattr(worker, "_weight_update_active", False)),
        }
        if isinstance(engine, MxWeightTransferEngine):
            status |= {"backend": BACKEND, **engine.transfer.status()}
        return status
