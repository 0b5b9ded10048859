"""Registration of the engine with vLLM, under the backend name ``mx``.

vLLM loads this module in every process of every server on a machine with refit-mx, whatever its
backend, so it imports nothing heavy.
"""

from __future__ import annotations

import logging
import re

from refit_mx.errors import RefitConfigError

BACKEND = "mx"
_LOG = logging.getLogger(__name__)
_MODULE, _CLASS = "refit_mx.engine.vllm", "MxWeightTransferEngine"


def plugin() -> None:
    """Register as a general plugin of vLLM: the entry point ``refit_mx`` of this distribution.

    An error in a plugin would end vLLM, even with another backend, so it is only logged. If ``mx``
    is requested, vLLM then refuses the unknown backend by name.
    """
    try:
        register()
    except ImportError as error:
        _LOG.info(
            "backend %r is not registered: this vLLM has no weight transfer: %r", BACKEND, error
        )
    except Exception as error:  # noqa: BLE001 - an unknown vLLM may raise anything
        _LOG.warning("backend %r is not registered: %r", BACKEND, error)


def register(name: str = BACKEND) -> bool:
    """Register with vLLM's factory, for ``--weight-transfer-config '{"backend": "mx"}'``.

    vLLM calls `plugin`, so call this only for another name, in an entry point of the group
    ``vllm.general_plugins``. vLLM calls such entry points in every process, and in some processes
    twice. Return whether this call registered the engine; False if it was registered already.

    Raises:
        RefitConfigError: another engine has the name, or this vLLM is not supported.
        ImportError: vLLM is missing, or has no weight transfer.
    """
    import vllm
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    check_vllm_version(vllm.__version__)
    try:
        WeightTransferEngineFactory.register_engine(name, _MODULE, _CLASS)
    except ValueError as error:
        if _registered_class(WeightTransferEngineFactory, name) == (_MODULE, _CLASS):
            return False
        raise RefitConfigError(
            f"vLLM has another weight transfer engine named {name!r}; choose another name: {error}"
        ) from error
    return True


def _registered_class(factory: type, name: str) -> tuple[str, str]:
    """Return module and name of the class registered under a name, by loading it."""
    loader = getattr(factory, "_registry", {}).get(name)
    engine = loader() if callable(loader) and not isinstance(loader, type) else loader
    return (getattr(engine, "__module__", ""), getattr(engine, "__qualname__", ""))


OLDEST = (0, 25)
NEWEST = (0, 33)
SUPPORTED = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"


def check_vllm_version(version: object) -> None:
    """Raise `RefitConfigError` if a version of vLLM is outside `SUPPORTED`, or cannot be parsed."""
    match = re.match(r"(\d+)\.(\d+)(\D|$)", version) if isinstance(version, str) else None
    if match is None or not OLDEST <= (int(match[1]), int(match[2])) <= NEWEST:
        raise RefitConfigError(
            f"vLLM {version!r}; refit-mx supports vLLM {SUPPORTED}. Install one of these"
        )
