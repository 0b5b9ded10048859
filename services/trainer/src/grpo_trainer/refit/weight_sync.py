"""Transfer of new weights to the generators, through refit-mx."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any  # Any: arguments of remote methods

from dataplane_core.telemetry import inject
from grpo_trainer.actors.address import is_loopback, node_address, resolve_hosts
from grpo_trainer.actors.calls import ActorCalls
from grpo_trainer.config.sections import RefitSection
from grpo_trainer.errors import WorkerError
from grpo_trainer.refit.settings import RefitSettings, connect
from grpo_trainer.refit.source import slot
from refit_mx import (
    ControlClient,
    Deadline,
    EmbeddedControlServer,
    RefitError,
    VersionNotFoundError,
    retry_idempotent,
)

_PROBE_S = 2.0


def version_number(version_id: str) -> int:
    """Return the number of a version that `RefitWeightSync` named."""
    return int(version_id.rsplit("-", 2)[1])


class RefitWeightSync:
    """Transfer of weights: policy workers publish, generation workers fetch and install.

    The driver creates versions in its embedded control plane or in that of a refit server. No
    weights pass through the driver.

    ``name`` becomes the prefix of the model's unique name in the control plane, which several runs
    may share. ``sources`` names the policy workers, by rank, ``targets`` the generation workers.

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
        self._sources, self._targets = list(sources), list(targets)
        self._timeout_s = config.timeout_s
        self._count = 0
        self._installed: int | None = None
        self._published: str | None = None
        self._begun: str | None = None
        # Paths are relative to the driver's folder, not to a worker's. Links are not resolved here:
        # links of a mounted secret change, and differ between machines.
        access = config.control_access.model_copy(
            update={
                key: path.absolute()
                for key in ("tls_ca", "token_file")
                if (path := getattr(config.control_access, key)) is not None
            }
        )
        with ExitStack() as stack:
            host, advertised = resolve_hosts(config.host, config.advertised_host)
            configured = config.advertised_host or config.host
            if is_loopback(configured):
                self._check_one_machine(configured)
            try:
                address = config.control
                if address is None:
                    address = stack.enter_context(
                        EmbeddedControlServer(host=host, advertised_host=advertised)
                    ).address
                self._control = stack.enter_context(connect(address, access))
            except RefitError as error:
                raise WorkerError(f"refit: {error}") from error
            settings = {
                **config.model_dump(),
                "control": address,
                "control_access": access.model_dump(),
                "model_name": self._model_name,
            }
            self._settings = RefitSettings.model_validate(settings)
            arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((self._settings,), {})
            calls.each("join_refit", dict.fromkeys((*sources, *targets), arguments))
            self._open = stack.pop_all()

    def _check_one_machine(self, host: str) -> None:
        """Refuse a loopback address for several machines.

        A worker would look for the weights on its own machine, until the deadline.
        """
        workers = (*self._sources, *self._targets)
        nodes = self._calls.each("node_address", dict.fromkeys(workers, ((), {})))
        if len({node_address(), *nodes.values()}) > 1:
            locations = ", ".join(f"{worker} on {node}" for worker, node in nodes.items())
            raise WorkerError(
                f"refit.host: {host} is reachable from one machine only, but the run is on several "
                f"(driver on {node_address()}, {locations}); set refit.host to 'node'"
            )

    def replace_sources(self, names: list[str]) -> None:
        """Let these policy workers, named by rank, publish from the next refit on.

        Raises:
            WorkerError: one of them cannot join.
        """
        self._sources = list(names)
        self._calls.each("join_refit", dict.fromkeys(names, ((self._settings,), {})))
        self._installed = None  # a target that joins needs a version that the new sources publish

    def add_target(self, name: str) -> None:
        """Let a generation worker take part from the next refit on.

        Raises:
            WorkerError: it cannot join.
        """
        self._calls.call(name, "join_refit", self._settings)
        self._targets.append(name)
        self._installed = None  # it has none of the installed weights

    def remove_target(self, name: str) -> None:
        """Leave a generation worker out of later refits."""
        if name in self._targets:
            self._targets.remove(name)

    def sync(self, version: int) -> None:
        """Install the policy's current weights as ``version`` on every generation worker.

        It returns once all of them serve it, and does nothing if they already do.

        Raises:
            WorkerError: a worker died, failed or did not answer in time.
        """
        if version != self._installed:
            self.refit(version)

    def refit(self, version: int) -> None:
        """Install as `sync`, even if the generation workers already serve ``version``.

        If the control plane restarted without its state and so lost the version, a second attempt
        publishes it again.
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
        try:
            self._request(
                lambda control: control.create_version(
                    self._model_name,
                    [slot(rank) for rank in range(len(self._sources))],
                    idempotency_key=version_id,
                    version_id=version_id,
                )
            )
            self._begun = version_id
            arguments = ((version_id,), {"carrier": inject()})
            self._publish(version_id, arguments)
            self._calls.each("install_weights", dict.fromkeys(self._targets, arguments))
            if (former := self._published) is not None:
                # This frees the arenas of the former version. A control plane that restarted
                # without its state has no such version.
                with suppress(VersionNotFoundError):
                    self._request(lambda control: control.delete_version(former))
        except RefitError as error:
            raise WorkerError(f"refit: {error}") from error
        self._installed, self._published = version, version_id

    def _publish(self, version_id: str, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        """Publish on every policy worker; if one fails, release the version.

        A version that stays STAGING would fill an arena of each worker that has published it, and
        the next publish would release the version that the generators serve.
        """
        try:
            self._calls.each("publish_weights", dict.fromkeys(self._sources, arguments))
        except BaseException:  # release it also on an interrupt
            with suppress(RefitError):
                deadline = Deadline(_PROBE_S, "refit: the control plane")
                self._control.within(deadline).delete_version(version_id)
            raise

    def _is_forgotten(self) -> bool:
        """Return whether the control plane answers, and lacks the version created last."""
        begun = self._begun
        if begun is None:
            return False
        # A short deadline: if a worker died, its error must reach the user soon.
        deadline = Deadline(min(_PROBE_S, self._timeout_s), "refit: the control plane")
        try:
            retry_idempotent(
                self._control,
                lambda control: control.get_version(begun),
                deadline=deadline,
                retry_s=_PROBE_S,
            )
        except VersionNotFoundError:
            return True
        except RefitError:
            return False
        return False

    def _request(self, call: Callable[[ControlClient], object]) -> None:
        """Call the control plane, and retry while it restarts."""
        deadline = Deadline(self._timeout_s, "refit: the control plane")
        retry_idempotent(self._control, call, deadline=deadline, retry_s=self._timeout_s)

    def close(self) -> None:
        """Close the connection to the control plane, and stop an embedded one.

        The workers end separately.
        """
        self._open.close()
