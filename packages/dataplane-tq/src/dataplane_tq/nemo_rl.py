"""`NeMoRLClient`: client for NeMo-RL's factory, with NeMo-RL's configuration and classes.

It imports ``nemo_rl``, so only processes of NeMo-RL import this module. docs/recipes/nemo-rl.md of
the repository has the ``elif`` for the factory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any  # Any: NeMo-RL has no static types here

from nemo_rl.data_plane import interfaces

from dataplane_core import KVBatchMeta
from dataplane_tq.client import TQDataPlaneClient


def _convert_result_meta(method: Callable[..., KVBatchMeta]) -> Any:
    """Return ``method`` with its result converted; both classes of metas have the same fields."""

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return interfaces.KVBatchMeta(**vars(method(*args, **kwargs)))

    return call


class NeMoRLClient(TQDataPlaneClient):
    """`TQDataPlaneClient` that is an instance of NeMo-RL's client, and returns NeMo-RL's metas.

    Args:
        cfg: NeMo-RL's section ``data_plane``, with the optional keys of
            `dataplane_core.DataPlaneConfig`. ``impl`` and ``observability`` are not used: the
            factory chose this client, and wraps it. ``backend`` may also be ``packed``, which
            starts no controller of TransferQueue unless ``transfer_queue_mirror`` is true.
        bootstrap: True starts the store, and `close` stops it. False attaches to the running one.

    Raises:
        ConfigError: (a ValueError) as `TQDataPlaneClient`.
        UnavailableError: as `TQDataPlaneClient`.
    """

    def __init__(self, cfg: Mapping[str, Any], *, bootstrap: bool = True) -> None:
        own = {name: value for name, value in cfg.items() if name != "observability"}
        if bootstrap and own.get("backend") == "packed":
            own.setdefault("transfer_queue_mirror", False)
        super().__init__(own, bootstrap=bootstrap)

    claim_meta = _convert_result_meta(TQDataPlaneClient.claim_meta)
    put_samples = _convert_result_meta(TQDataPlaneClient.put_samples)
    put_columns = _convert_result_meta(TQDataPlaneClient.put_columns)


interfaces.DataPlaneClient.register(NeMoRLClient)
