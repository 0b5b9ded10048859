"""What a worker is told, once and for each update. Comes as JSON over HTTP."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from refit_mx.errors import RefitConfigError
from refit_mx.settings import ReceiverSettings


# Any: options are those of the compile pass that is named.
@dataclass
class MxInitInfo:
    """What a worker is told once; comes as JSON.

    Attributes:
        control_address: HOST:PORT of the control plane. What certificates to trust and what token
            to bring is in the environment of the engine's process, see
            `refit_mx.control.access.ControlAccess.from_environment`.
        model_name: in the control plane; None for the one that the engine serves.
        rank_offset: of this server's first worker among all receivers of the model.
        transport: ``auto``, ``nixl``, ``shm`` or ``tcp``.
        compile_target: what the model's weights are: a compile pass of this name runs.
        compile_options: of that pass.
        source_target: the compile target to receive; None for those that the pass accepts. The same
            as ``compile_target`` receives bytes that the trainer has compiled, as they are.
        source_metadata: what the publisher must say of its bytes.
        timeout_s: for receiving a version.
        attempts: of receiving, after sources were lost.
        receiver_settings: fields of `refit_mx.settings.ReceiverSettings`, such as
            ``stall_timeout_s``; the others keep their defaults.

    Raises:
        ValueError: a wrong value.
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
    receiver_settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.settings()  # refuses wrong ones
        if not self.control_address:
            raise RefitConfigError("init_info: control_address is missing; expected HOST:PORT")
        if not self.timeout_s > 0 or self.attempts < 1 or self.rank_offset < 0:
            raise RefitConfigError(
                f"init_info: timeout_s {self.timeout_s!r}, attempts {self.attempts!r}, rank_offset "
                f"{self.rank_offset!r}; expected more than 0, at least 1, at least 0"
            )

    def settings(self) -> ReceiverSettings:
        """Of the receiver.

        Raises:
            ValueError: an unknown name, or a wrong value.
        """
        known = ReceiverSettings.__dataclass_fields__
        for name, value in self.receiver_settings.items():
            if name not in known:
                raise RefitConfigError(
                    f"init_info: receiver_settings has {name!r}; expected some of "
                    f"{', '.join(known)}"
                )
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise RefitConfigError(
                    f"init_info: receiver_settings: {name} {value!r}; expected a number"
                )
        try:
            return ReceiverSettings(**self.receiver_settings)
        except RefitConfigError as error:
            raise RefitConfigError(f"init_info: receiver_settings: {error}") from None


@dataclass
class MxUpdateInfo:
    """What a worker is told for each update; comes as JSON.

    Attributes:
        version_id: to receive; exactly this one.
        names: only these of the model's parameters, a partial update; None for all.
        timeout_s: instead of that of `MxInitInfo`.
        abort: end the update that is under way, if any, and keep the weights. The interface has no
            call for that. Goes with nothing else.
        check: see that the worker may serve and that its weights are of ``version_id``, empty for
            those of its launch; nothing is received. Goes with nothing else.

    Raises:
        ValueError: a wrong value.
    """

    version_id: str = ""
    names: list[str] | None = None
    timeout_s: float | None = None
    abort: bool = False
    check: bool = False

    def __post_init__(self) -> None:
        if (self.abort and (self.version_id or self.check)) or (self.check and self.names):
            raise RefitConfigError(
                f"update_info: version_id {self.version_id!r}, names {self.names!r}, abort "
                f"{self.abort!r}, check {self.check!r}; expected a version and names, a version "
                "and check, or abort alone"
            )
        if not self.version_id and not self.abort and not self.check:
            raise RefitConfigError("update_info: version_id ''; expected a version, or abort alone")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise RefitConfigError(f"update_info: timeout_s {self.timeout_s!r}; expected above 0")
