"""Making the engine known to vLLM, under the backend's name ``mx``.

vLLM loads this module in every process of every server on a machine where refit-mx is installed,
whatever its backend, so it imports nothing heavy.
"""

from __future__ import annotations

import logging

from refit_mx.errors import RefitConfigError

BACKEND = "mx"
_LOG = logging.getLogger(__name__)
_MODULE, _CLASS = "refit_mx.engine.vllm", "MxWeightTransferEngine"


def plugin() -> None:
    """`register`, as vLLM's general plugin: the entry point ``refit_mx`` of this distribution.

    An error of a plugin would end vLLM, also one that asks for another backend, so it is logged.
    vLLM then refuses the backend ``mx`` by name where it is asked for.
    """
    try:
        register()
    except ImportError as error:
        _LOG.info(
            "backend %r is not registered, this vLLM has no weight transfer: %s", *_say(error)
        )
    except Exception as error:  # noqa: BLE001 - whatever a vLLM of another generation does
        _LOG.warning("backend %r is not registered: %s", *_say(error))


def register(name: str = BACKEND) -> bool:
    """Register with vLLM's factory, for ``--weight-transfer-config '{"backend": "mx"}'``.

    vLLM calls `plugin` by itself. Call this for another name, from a ``vllm.general_plugins`` entry
    point of your own: vLLM calls those in every process, some of them twice.

    Args:
        name: of the backend.

    Returns:
        Whether this call registered it; False if it was registered before.

    Raises:
        RefitConfigError: another engine has the name.
        ImportError: vLLM is missing, or has no weight transfer.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    try:
        WeightTransferEngineFactory.register_engine(name, _MODULE, _CLASS)
    except ValueError as error:
        if _registered_class(WeightTransferEngineFactory, name) == (_MODULE, _CLASS):
            return False
        raise RefitConfigError(
            f"vLLM has another weight transfer engine named {name!r}; choose another name: {error}"
        ) from error
    return True


def _say(error: Exception) -> tuple[str, str]:
    return BACKEND, f"{type(error).__name__}: {error}"


def _registered_class(factory: type, name: str) -> tuple[str, str]:
    """Module and name of the class that a factory makes under a name; made by loading it."""
    loader = getattr(factory, "_registry", {}).get(name)
    found = loader() if callable(loader) and not isinstance(loader, type) else loader
    return (getattr(found, "__module__", ""), getattr(found, "__qualname__", ""))
