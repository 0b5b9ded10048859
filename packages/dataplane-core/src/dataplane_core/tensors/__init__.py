"""Conversions of tensors to rows, columns and bytes.

torch and tensordict come with the extra ``tensors``. Modules that need them import this package
first, so that the error without them names the extra.
"""

try:
    import tensordict  # noqa: F401
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError(
        f"dataplane_core: no module named {error.name!r}; tensors need torch and tensordict: "
        "install the extra, dataplane-core[tensors]"
    ) from error
