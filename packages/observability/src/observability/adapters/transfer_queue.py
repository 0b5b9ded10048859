"""Instrumentor for TransferQueue's client: spans and sample events of puts, claims, gets, clears.

``opentelemetry-instrument python -m …`` calls it in each process that inherits the environment,
such as Ray's workers. The program needs no changes. If the span of an operation is recorded, those
keys of its samples that are unknown are queried too, for at most 0.1 s. A put to a meta or to keys
also stores its span context as a tag, which no result of a traced client has.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any  # Any: modules of TransferQueue, which has no types

from opentelemetry.instrumentation.instrumentor import BaseInstrumentor  # type: ignore[attr-defined]
from wrapt import register_post_import_hook

_MODULE = "transfer_queue.client"
_ORIGINAL = "_without_spans"
"""Name of a wrapper's attribute that holds the original method."""


class TransferQueueInstrumentor(BaseInstrumentor):
    """Instrumentor of TransferQueue's clients, synchronous and asynchronous.

    It imports torch only when the program imports TransferQueue. Ray's helper processes inherit the
    instrumentation and must start quickly; they do not import TransferQueue.
    """

    _is_enabled = False
    _has_hook = False
    """True from the registration of the import hook until it runs. A hook cannot be removed."""

    def instrumentation_dependencies(self) -> Collection[str]:
        """Return the supported versions of TransferQueue."""
        return ("TransferQueue >= 0.1.9, < 0.2",)

    def _instrument(self, **options: Any) -> None:
        self._is_enabled = True
        if not self._has_hook:
            self._has_hook = True
            register_post_import_hook(self._on_import, _MODULE)

    def _uninstrument(self, **options: Any) -> None:
        """Restore the original methods, except those of existing synchronous clients."""
        self._is_enabled = False
        if self._has_hook:
            return  # nothing is wrapped yet
        module: Any = sys.modules[_MODULE]
        for name, method in list(vars(module.AsyncTransferQueueClient).items()):
            if hasattr(method, _ORIGINAL):
                setattr(module.AsyncTransferQueueClient, name, getattr(method, _ORIGINAL))

    def _on_import(self, module: Any) -> None:
        self._has_hook = False
        if self._is_enabled:
            _wrap(module)


def _wrap(module: Any) -> None:
    from observability.adapters.transfer_queue_spans import WRAPPERS

    for name, wrapper in WRAPPERS.items():
        method = getattr(module.AsyncTransferQueueClient, name)
        traced_method = wrapper(method)
        setattr(traced_method, _ORIGINAL, method)
        setattr(module.AsyncTransferQueueClient, name, traced_method)
