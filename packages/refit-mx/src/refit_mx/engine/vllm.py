"""`MxWeightTransferEngine`: refit as a weight-transfer backend of vLLM, in both interface forms.

Imports vLLM, so import it only where vLLM runs; `refit_mx.engine.registration.register` makes vLLM
do so by itself. What an update does is in `refit_mx.engine.weight_transfer`; here is only the form.

The newest form gives the engine its model and calls one method a phase. The older one gives it no
model, calls `receive_weights` alone, and hands it a function that loads whole tensors by their
checkpoint names; all phases are in that call then, so a fleet cannot wait in the middle.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from refit_mx.engine.infos import MxInitInfo, MxUpdateInfo
from refit_mx.engine.weight_transfer import LoadWeights, MxWeightTransfer
from refit_mx.errors import RefitConfigError

_SIGNATURE = inspect.signature(WeightTransferEngine.__init__)
GIVES_THE_MODEL = "model" in _SIGNATURE.parameters
"""Whether this vLLM has the newest form."""


@dataclass
class MxWeightTransferInitInfo(MxInitInfo, WeightTransferInitInfo):
    """`MxInitInfo`, as vLLM types it."""


@dataclass
class MxWeightTransferUpdateInfo(MxUpdateInfo, WeightTransferUpdateInfo):
    """`MxUpdateInfo`, as vLLM types it."""


class MxWeightTransferEngine(WeightTransferEngine):
    """Installs exactly the version of the control plane that an update names.

    Any: arguments are vLLM's own objects, of which only the names used here are relied on.
    """

    init_info_cls = MxWeightTransferInitInfo
    update_info_cls = MxWeightTransferUpdateInfo
    supports_draft_weight_update = True
    defers_processing = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        given = _SIGNATURE.bind(self, *args, **kwargs).arguments
        vllm_config = given.get("vllm_config")
        parallel = given.get("parallel_config") or getattr(vllm_config, "parallel_config", None)
        self._transfer = MxWeightTransfer(
            model=given.get("model"),
            model_name=getattr(getattr(vllm_config, "model_config", None), "model", None),
            rank=int(getattr(parallel, "rank", 0)),
            device=given.get("device") or "cpu",
        )

    @property
    def transfer(self) -> MxWeightTransfer:
        """Phase, fence, version and statistics."""
        return self._transfer

    def init_transfer_engine(self, init_info: MxWeightTransferInitInfo) -> None:
        """See `MxWeightTransfer.init`."""
        self._transfer.init(init_info)

    def start_weight_update(self) -> None:
        """See `MxWeightTransfer.start`."""
        self._transfer.start()

    def receive_weights(
        self, update_info: MxWeightTransferUpdateInfo, load_weights: LoadWeights | None = None
    ) -> None:
        """See `MxWeightTransfer.receive`; with ``load_weights``, the older form, `receive_into`.

        Raises:
            RefitConfigError: the older form without ``load_weights``.
        """
        if load_weights is not None:
            self._transfer.receive_into(update_info, load_weights)
        elif GIVES_THE_MODEL:
            self._transfer.receive(update_info)
        else:
            raise RefitConfigError("receive_weights: this form of vLLM gives load_weights")

    def finish_weight_update(self) -> None:
        """See `MxWeightTransfer.finish`."""
        self._transfer.finish()

    def shutdown(self) -> None:
        """See `MxWeightTransfer.shutdown`."""
        self._transfer.shutdown()

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: Any) -> None:
        """vLLM's way to send; there is nothing to send to, since workers fetch.

        Raises:
            RefitConfigError: always.
        """
        raise RefitConfigError(
            "trainer_send_weights: publish with refit_mx's MxV2TrainingPublisher instead; "
            "the workers fetch from it"
        )
