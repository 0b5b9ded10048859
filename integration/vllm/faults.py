"""Faults inside a vLLM worker, added by vLLM's worker extension class.

Arguments are strings, since they come by ``/collective_rpc``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from refit_mx import SourceLostError
from refit_mx.engine.status import RefitStatus


class FaultyWorker(RefitStatus):
    """`RefitStatus` with methods that make an update fail or generation slow."""

    def fail_next_install(self, rank: str) -> None:
        """Make a layer's processing fail once, after earlier layers have new weights."""

        def fail() -> None:
            raise RuntimeError("the test makes this layer fail")

        self._in_next_install(rank, fail)

    def fail_next_fetch(self, rank: str) -> None:
        """Make the next fetch fail."""

        def fail() -> None:
            raise SourceLostError("the test makes this rank fail")

        self._in_next_fetch(rank, fail)

    def signal_in_next_install(self, rank: str, pid: str, number: str) -> None:
        """Signal a process in the middle of the next install."""
        self._in_next_install(rank, lambda: os.kill(int(pid), int(number)))

    def signal_in_next_fetch(self, rank: str, pid: str, number: str) -> None:
        """Signal a process before the first byte of the next fetch."""
        self._in_next_fetch(rank, lambda: os.kill(int(pid), int(number)))

    def signal_in_next_prepare(self, rank: str, pid: str, number: str) -> None:
        """Signal a process when the next session is opened."""
        worker: Any = self
        if worker.rank != int(rank):
            return
        engine = worker.weight_transfer_engine
        start = engine.start_weight_update

        def act_once() -> None:
            del engine.start_weight_update
            os.kill(int(pid), int(number))
            start()

        engine.start_weight_update = act_once

    def drop_before_next_finish(self, rank: str) -> None:
        """Drop the fetched version before the next finish, as another client may do."""
        worker: Any = self
        if worker.rank != int(rank):
            return
        transfer = worker.weight_transfer_engine.transfer
        finish = transfer.finish

        def drop_once() -> None:
            del transfer.finish
            transfer.drop()
            finish()

        transfer.finish = drop_once

    def delay_next_fetch(self, rank: str, seconds: str) -> None:
        """Delay the next fetch."""
        self._in_next_fetch(rank, lambda: time.sleep(float(seconds)))

    def sleep_each_step(self, seconds: str) -> None:
        """Delay each step of generation, so that no response ends meanwhile."""
        worker: Any = self
        execute = type(self).execute_model  # type: ignore[attr-defined]

        def execute_slowly(*arguments: Any, **options: Any) -> Any:
            time.sleep(float(seconds))
            return execute(self, *arguments, **options)

        worker.execute_model = execute_slowly

    def _in_next_install(self, rank: str, act: Callable[[], None]) -> None:
        worker: Any = self
        if worker.rank != int(rank):
            return
        methods = [
            layer.quant_method
            for layer in worker.model_runner.model.modules()
            if getattr(layer, "quant_method", None) is not None
        ]
        method = methods[len(methods) // 2]
        process = method.process_weights_after_loading

        def act_once(layer: Any) -> None:
            del method.process_weights_after_loading
            act()
            process(layer)

        method.process_weights_after_loading = act_once

    def _in_next_fetch(self, rank: str, act: Callable[[], None]) -> None:
        worker: Any = self
        if worker.rank != int(rank):
            return
        transfer = worker.weight_transfer_engine.transfer
        receive = transfer._receive

        def act_once(*arguments: Any) -> Any:
            del transfer._receive
            act()
            return receive(*arguments)

        transfer._receive = act_once
