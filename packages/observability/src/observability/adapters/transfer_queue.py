"""Instrumentor for TransferQueue's client: spans and sample events of puts, claims, gets, clears.

``opentelemetry-instrument python -m …`` calls it in each process that inherits its environment,
such as Ray's workers; no code changes. An operation with a recorded span also queries the keys of
its samples. A put with tags adds its span context to them; listings and claims remove that tag.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any  # Any: modules of TransferQueue, which has no types

from opentelemetry.instrumentation.instrumentor import BaseInstrumentor  # type: ignore[attr-defined]
from wrapt import register_post_import_hook

_MODULE = "transfer_queue.client"
_WRAPPED = "_without_spans"
"""Attribute of a wrapper: the method that it replaces."""


class TransferQueueInstrumentor(BaseInstrumentor):
    """Instrumentor of TransferQueue's clients, synchronous and asynchronous.

    It imports neither TransferQueue nor torch before the program imports TransferQueue: Ray has
    helper processes that inherit the instrumentation and must start quickly.
    """

    _is_enabled = False
    _is_pending = False
    """True while a hook waits for the import; `wrapt` cannot remove it, so it is used again."""

    def instrumentation_dependencies(self) -> Collection[str]:
        """Return the supported versions."""
        return ("TransferQueue >= 0.1.9, < 0.2",)

    def _instrument(self, **options: Any) -> None:
        self._is_enabled = True
        if not self._is_pending:
            self._is_pending = True
            register_post_import_hook(self._on_import, _MODULE)

    def _uninstrument(self, **options: Any) -> None:
        """Restore the methods; a synchronous client that exists already keeps the wrapped ones."""
        self._is_enabled = False
        if self._is_pending:
            return
        module: Any = sys.modules[_MODULE]
        for name, method in list(vars(module.AsyncTransferQueueClient).items()):
            if hasattr(method, _WRAPPED):
                setattr(module.AsyncTransferQueueClient, name, getattr(method, _WRAPPED))

    def _on_import(self, module: Any) -> None:
        self._is_pending = False
        if self._is_enabled:
            _wrap(module)


def _wrap(module: Any) -> None:
    from observability.adapters.transfer_queue_spans import WRAPPERS

    for name, wrapper in WRAPPERS.items():
        method = getattr(module.AsyncTransferQueueClient, name)
        wrapped = wrapper(method)
        setattr(wrapped, _WRAPPED, method)
        setattr(module.AsyncTransferQueueClient, name, wrapped)
