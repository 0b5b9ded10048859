"""`MxWeightTransferEngine`: refit as a weight-transfer backend of vLLM.

This module imports vLLM, so import it only where vLLM runs. `refit_mx.engine.registration.register`
makes vLLM import it. It has vLLM's interface; `refit_mx.engine.weight_transfer` does the updates.

vLLM keeps a flag for the session from ``start`` to ``finish``. An ``update`` that raises ends it; a
``finish`` that raises leaves it open. Any order of calls that vLLM allows is valid here. For
example, a ``finish`` without an update ends the session and installs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from refit_mx.engine.infos import MxInitInfo, MxUpdateInfo
from refit_mx.engine.weight_transfer import MxWeightTransfer
from refit_mx.errors import RefitConfigError


@dataclass
class MxWeightTransferInitInfo(MxInitInfo, WeightTransferInitInfo):
    """`MxInitInfo` with vLLM's base class."""


@dataclass
class MxWeightTransferUpdateInfo(MxUpdateInfo, WeightTransferUpdateInfo):
    """`MxUpdateInfo` with vLLM's base class."""


class MxWeightTransferEngine(WeightTransferEngine):
    """Engine that installs exactly the version that an update names.

    Arguments typed Any are vLLM's objects.
    """

    init_info_cls = MxWeightTransferInitInfo
    update_info_cls = MxWeightTransferUpdateInfo
    supports_draft_weight_update = False
    defers_processing = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self._config = vllm_config
        self.transfer = MxWeightTransfer(
            model,
            vllm_config.model_config,
            rank=int(vllm_config.parallel_config.rank),
            device=torch.device(device),
        )
        """This worker's updates."""

    def init_transfer_engine(self, init_info: MxWeightTransferInitInfo) -> None:
        """See `MxWeightTransfer.init`."""
        self.transfer.init(init_info)

    def start_weight_update(self) -> None:
        """Begin a session, and drop what an earlier session fetched but did not install."""
        self.transfer.drop()

    def receive_weights(self, update_info: MxWeightTransferUpdateInfo) -> None:
        """Fetch a version, begin to fetch it, or drop the fetch; see `MxUpdateInfo`."""
        if update_info.abort:
            self.transfer.drop()
            return
        # vLLM before 0.27 does not set its config for these calls, but loaders and layers read it.
        with set_current_vllm_config(self._config):
            if update_info.background:
                self.transfer.begin(update_info)
            else:
                self.transfer.join(update_info)

    def finish_weight_update(self) -> None:
        """See `MxWeightTransfer.finish`."""
        with set_current_vllm_config(self._config):
            self.transfer.finish()

    def shutdown(self) -> None:
        """See `MxWeightTransfer.release`. vLLM calls it when it stops, and may initialize again."""
        self.transfer.release()

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: Any) -> None:
        """Refuse, since workers fetch; vLLM before 0.28 requires this method.

        Raises:
            RefitConfigError: always.
        """
        raise RefitConfigError(
            "trainer_send_weights: publish with refit_mx's MxV2TrainingPublisher instead; "
            "the workers fetch from it"
        )
