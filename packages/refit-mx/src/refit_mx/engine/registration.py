"""Making the engine known to vLLM, under the backend's name ``mx``."""

from __future__ import annotations

from refit_mx.errors import RefitConfigError

BACKEND = "mx"
_MODULE, _CLASS = "refit_mx.engine.vllm", "MxWeightTransferEngine"


def register(name: str = BACKEND) -> bool:
    """Register with vLLM's factory, for ``--weight-transfer-config '{"backend": "mx"}'``.

    Callable from a ``vllm.general_plugins`` entry point. vLLM calls those in every process, some of
    them twice.

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


def _registered_class(factory: type, name: str) -> tuple[str, str]:
    """Module and name of the class that a factory makes under a name; made by loading it."""
    loader = getattr(factory, "_registry", {}).get(name)
    found = loader() if callable(loader) and not isinstance(loader, type) else loader
    return (getattr(found, "__module__", ""), getattr(found, "__qualname__", ""))
