"""How new weights reach the generators: a small protocol, and the way through refit-mx."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Protocol

from dataplane_core.telemetry import inject
from grpo_trainer.actor_calls import ActorCalls
from grpo_trainer.errors import WorkerError
from grpo_trainer.node_address import is_loopback, node_address, own_hosts
from grpo_trainer.refit_settings import RefitSettings, connect
from grpo_trainer.refit_source import slot
from grpo_trainer.sections import RefitSection
from refit_mx import (
    ControlClient,
    Deadline,
    EmbeddedControlServer,
    RefitError,
    VersionNotFoundError,
    patiently,
)

_PROBE_S = 2.0


class WeightSync(Protocol):
    """Brings the policy's weights to the generation workers."""

    def sync(self, version: int) -> None:
        """Install the policy's current weights as ``version`` on every generation worker.

        Returns once all of them serve it. Does nothing if they already do.

        Raises:
            WorkerError: a worker died, failed or did not answer in time.
        """


class RefitWeightSync:
    """`WeightSync` through refit-mx: the policy workers publish, the generation workers read.

    The driver names versions in a control plane, its own or a refit server; no weights pass through
    it.

    Args:
        calls: the run's actors.
        config: the run's section.
        name: of the run's model in the control plane, which several runs may share; made unique.
        sources: names of the policy workers, by rank.
        targets: names of the generation workers.

    Raises:
        WorkerError: the control plane cannot be started or reached, or a worker cannot join.
    """

    def __init__(
        self,
        calls: ActorCalls,
        config: RefitSection,
        *,
        name: str,
        sources: list[str],
        targets: list[str],
    ) -> None:
        self._calls = calls
        self._model_name = f"{name}-{secrets.token_hex(4)}"
        self._sources, self._targets = sources, targets
        self._timeout_s = config.timeout_s
        self._count = 0
        self._installed: int | None = None
        self._published: str | None = None
        self._begun: str | None = None
        # Relative to the driver's folder, not to that of a worker. It is the worker that follows
        # links: those of a mounted secret change, and lead elsewhere on other machines.
        access = config.control_access.model_copy(
            update={
                key: path.absolute()
                for key in ("tls_ca", "token_file")
                if (path := getattr(config.control_access, key)) is not None
            }
        )
        with ExitStack() as stack:
            host, told = own_hosts(config.host, config.advertised_host)
            configured = config.advertised_host or config.host
            if is_loopback(configured):
                self._check_one_machine(configured)
            try:
                address = config.control
                if address is None:
                    address = stack.enter_context(
                        EmbeddedControlServer(host=host, advertised_host=told)
                    ).address
                self._control = stack.enter_context(connect(address, access))
            except RefitError as error:
                raise WorkerError(f"refit: {error}") from error
            settings = RefitSettings(
                control=address,
                control_access=access,
                model_name=self._model_name,
                transport=config.transport,
                host=config.host,
                advertised_host=config.advertised_host,
                tensor_parallel=config.generation_tensor_parallel,
                timeout_s=config.timeout_s,
            )
            joining = (settings.model_dump(),)
            calls.each("join_refit", dict.fromkeys((*sources, *targets), (joining, {})))
            self._open = stack.pop_all()

    def _check_one_machine(self, host: str) -> None:
        """Else a worker would look for the weights on its own machine, until the deadline."""
        workers = (*self._sources, *self._targets)
        found = self._calls.each("node_address", dict.fromkeys(workers, ((), {})))
        if len({node_address(), *found.values()}) > 1:
            where = ", ".join(f"{worker} on {node}" for worker, node in found.items())
            raise WorkerError(
                f"refit.host: {host} is reached from one machine alone, the run is on several "
                f"(driver on {node_address()}, {where}); set refit.host to 'node'"
            )

    def sync(self, version: int) -> None:
        """See `WeightSync.sync`."""
        if version != self._installed:
            self.refit(version)

    def refit(self, version: int) -> None:
        """As `sync`, also where the generation workers serve ``version``.

        Once more, where the control plane was started again without its state meanwhile: it has
        forgotten the version, and the workers have what it takes to tell it again.

        Raises:
            WorkerError: as `sync`.
        """
        try:
            self._refit(version)
        except WorkerError:
            if not self._is_forgotten():
                raise
            self._refit(version)

    def _refit(self, version: int) -> None:
        self._begun = None
        self._count += 1
        version_id = f"{self._model_name}-{version}-{self._count}"
        carrier = {"carrier": inject()}
        try:
            self._ask(
                lambda control: control.create_version(
                    self._model_name,
                    [slot(rank) for rank in range(len(self._sources))],
                    idempotency_key=version_id,
                    version_id=version_id,
                )
            )
            self._begun = version_id
            for method, workers in (
                ("publish_weights", self._sources),
                ("install_weights", self._targets),
            ):
                self._calls.each(method, dict.fromkeys(workers, ((version_id,), carrier)))
            if (former := self._published) is not None:
                # Its arenas are free for the version after this one. A control plane that was
                # started again without its state has forgotten it.
                with suppress(VersionNotFoundError):
                    self._ask(lambda control: control.delete_version(former))
        except RefitError as error:
            raise WorkerError(f"refit: {error}") from error
        self._installed, self._published = version, version_id

    def _is_forgotten(self) -> bool:
        """Whether the control plane answers and does not know the version that was begun."""
        begun = self._begun
        if begun is None:
            return False
        # Of one that is away, too, since a worker that died is to be told of soon.
        deadline = Deadline(min(_PROBE_S, self._timeout_s), "refit: the control plane")
        try:
            patiently(
                self._control,
                lambda control: control.get_version(begun),
                deadline=deadline,
                patience_s=_PROBE_S,
            )
        except VersionNotFoundError:
            return True
        except RefitError:
            return False
        return False

    def _ask(self, call: Callable[[ControlClient], object]) -> None:
        """Of a control plane that may be away, since it is being started again."""
        deadline = Deadline(self._timeout_s, "refit: the control plane")
        patiently(self._control, call, deadline=deadline, patience_s=self._timeout_s)

    def close(self) -> None:
        """Let go of the control plane; the workers end by themselves."""
        self._open.close()
