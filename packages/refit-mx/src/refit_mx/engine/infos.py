"""Arguments of a vLLM worker's initialization and updates, which come as JSON over HTTP."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, TypeGuard

from refit_mx.errors import RefitConfigError
from refit_mx.settings import ReceiverSettings


# Any: each compile pass has its own options.
@dataclass
class MxInitInfo:
    """Arguments of ``init_weight_transfer_engine``, which come as JSON.

    Attributes:
        control_address: HOST:PORT of the control plane. Certificates and the token come from the
            environment of the engine's process, see
            `refit_mx.control.access.ControlAccess.from_environment`.
        model_name: model in the control plane; None for the one that the engine serves.
        rank_offset: rank of this server's first worker among all receivers of the model.
        transport: ``auto``, ``nixl``, ``shm`` or ``tcp``.
        compile_target: target of the model's weights; the compile pass of this name runs.
        compile_options: options of that pass.
        source_target: compile target to receive; None for any target that the pass accepts. If
            equal to ``compile_target``, bytes that the trainer compiled are received unchanged.
        source_metadata: values that the publisher's metadata must have.
        timeout_s: time limit of receiving a version.
        attempts: number of attempts to receive, if sources are lost.
        errors: ``raise`` makes a call that fails on any rank raise on all ranks. But then vLLM
            reads only the first answer, and mistakes the others for answers to the next call. With
            ``status`` no call raises, and the caller reads `refit_mx.engine.status.RefitStatus`
            instead, as the fleet client does.
        receiver_settings: fields of `refit_mx.settings.ReceiverSettings`, such as
            ``stall_timeout_s``; the others have their defaults.

    Raises:
        ValueError: a value is wrong.
    """

    control_address: str = ""
    model_name: str | None = None
    rank_offset: int = 0
    transport: str = "auto"
    compile_target: str = "hf_raw"
    compile_options: dict[str, Any] = field(default_factory=dict)
    source_target: str | None = None
    source_metadata: dict[str, Any] = field(default_factory=dict)
    timeout_s: float = 120.0
    attempts: int = 3
    errors: str = "raise"
    receiver_settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.settings()  # raises if one is wrong
        if not self.control_address:
            raise RefitConfigError("init_info: control_address is missing; expected HOST:PORT")
        _check_timeout("init_info", self.timeout_s)
        for name, minimum in (("attempts", 1), ("rank_offset", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
                raise RefitConfigError(
                    f"init_info: {name} {value!r}; expected an integer of at least {minimum}"
                )
        if self.errors not in ("raise", "status"):
            raise RefitConfigError(f"init_info: errors {self.errors!r}; expected raise or status")

    def settings(self) -> ReceiverSettings:
        """Return the receiver's settings.

        Raises:
            ValueError: a name is unknown, or a value is wrong.
        """
        known = [each.name for each in fields(ReceiverSettings)]
        for name, value in self.receiver_settings.items():
            if name not in known:
                raise RefitConfigError(
                    f"init_info: receiver_settings has {name!r}; expected one of {', '.join(known)}"
                )
            if not _is_number(value):
                raise RefitConfigError(
                    f"init_info: receiver_settings: {name} {value!r}; expected a number"
                )
        return ReceiverSettings(**self.receiver_settings)


@dataclass
class MxUpdateInfo:
    """Arguments of ``update_weights``, which come as JSON.

    Attributes:
        version_id: id of the version to receive.
        timeout_s: time limit; None for that of `MxInitInfo`.
        background: begin to fetch and return; generation continues meanwhile. The first call, and a
            call after a failed fetch, derives the layout before it returns. The same call without
            ``background`` waits until the fetch is complete.
        abort: drop the fetch and keep the weights; allowed only without ``version_id`` and
            ``background``.

    Raises:
        ValueError: a value is wrong.
    """

    version_id: str = ""
    timeout_s: float | None = None
    background: bool = False
    abort: bool = False

    def __post_init__(self) -> None:
        if bool(self.version_id) == self.abort or (self.abort and self.background):
            raise RefitConfigError(
                f"update_info: version_id {self.version_id!r}, background {self.background!r}, "
                f"abort {self.abort!r}; expected a version, or abort alone"
            )
        if self.timeout_s is not None:
            _check_timeout("update_info", self.timeout_s)


def _check_timeout(info: str, timeout_s: object) -> None:
    if not _is_number(timeout_s) or not timeout_s > 0:
        raise RefitConfigError(f"{info}: timeout_s {timeout_s!r}; expected a number above 0")


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
