"""Rules and webhooks of alerts: a YAML file, checked by pydantic."""

from __future__ import annotations

import base64
import binascii
import math
import os
from pathlib import Path
from typing import Annotated, Any, Self  # Any: JSON
from urllib.parse import urlsplit

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from dataplane_admin.models import AlertKind, AlertSeverity
from observability.step_metrics import exported_name

_DEFAULT = Path(__file__).with_name("default.yaml")
_MAX_RULES = 100
_MAX_WEBHOOKS = 10
_MIN_SECRET_BYTES = 24
SECONDS = frozenset({"no_step", "blocked", "telemetry_lost"})
"""Kinds whose value is a duration in seconds."""
FRACTIONS = frozenset({"store_full", "reward_collapsed"})
"""Kinds whose value is a fraction."""

_WITHOUT_BOUND = ("metric", "not_finite", "run_failed")

Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")]


def _without_default(schema: dict[str, Any]) -> None:
    del schema["default"]


class _Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )


class Rule(_Section):
    """A condition that raises an alert for each run or store whose value is beyond the bound."""

    name: Name
    """Name of the alert, unique."""
    kind: AlertKind
    """Kind of the value that is compared with the bound."""
    metric: Annotated[str, Field(max_length=500)] = ""
    """Step metric of the kind ``metric``, such as ``rl.entropy``. Its value at the newest step is
    compared for each set of attributes; ``rl.reward.component{format}`` names one set. A trainer's
    own name is replaced by the exported one. The kind ``not_finite`` checks this metric instead of
    loss, gradient norm and reward."""
    above: Annotated[float, Field(strict=True)] | None = None
    """Maximum value of ``metric`` without an alert."""
    below: Annotated[float, Field(strict=True)] | None = None
    """Minimum value of ``metric`` without an alert, instead of ``above``."""
    bound: Annotated[
        float,
        Field(strict=True, ge=0, validate_default=True, json_schema_extra=_without_default),
    ] = None  # type: ignore[assignment]  # `_fits_kind` replaces it
    """Maximum value without an alert, required except for ``metric``, ``not_finite`` and
    ``run_failed``, which have none. Seconds for ``no_step``, ``blocked`` and ``telemetry_lost``;
    items for ``telemetry_dropped``; a fraction for ``store_full``; the lost fraction of the best
    reward for ``reward_collapsed``; weight versions for ``staleness``; nats for
    ``logprob_gap``."""
    for_s: Annotated[float, Field(strict=True, ge=0, le=86_400)] = 0.0
    """Seconds for which the value must be beyond the bound to raise the alert. To clear it, the
    value must be within the bound by 10 % of the bound for as long."""
    severity: AlertSeverity = "warning"
    runs: Annotated[str, Field(min_length=1, max_length=500)] = "*"
    """Pattern of run ids with ``*``, ``?`` and ``[...]``."""

    @field_validator("metric")
    @classmethod
    def _is_exported(cls, metric: str) -> str:
        # A trainer's own name, such as ``actor/lr@head``, is exported as another one.
        name, brace, attributes = metric.partition("{")
        return f"{exported_name(name)}{brace}{attributes}" if name else metric

    @field_validator("bound", mode="before")
    @classmethod
    def _fits_kind(cls, bound: Any, info: ValidationInfo) -> Any:
        kind = info.data.get("kind")
        if bound is None and kind not in (None, *_WITHOUT_BOUND):
            raise ValueError(f"missing; the kind {kind} needs one")
        if bound is not None and kind in _WITHOUT_BOUND:
            raise ValueError(f"found {bound!r}; the kind {kind} has none")
        return 0.0 if bound is None else bound

    @model_validator(mode="after")
    def _fits_its_kind(self) -> Self:
        sides = [side for side in (self.above, self.below) if side is not None]
        if self.kind == "metric" and not (self.metric and len(sides) == 1):
            raise ValueError("expected metric, and either above or below")
        if self.kind != "metric" and (sides or (self.metric and self.kind != "not_finite")):
            raise ValueError(f"the kind {self.kind} has no metric, above or below")
        if self.kind == "store_full" and self.bound >= 1:
            raise ValueError(f"bound: found {self.bound:g}; expected a fraction below 1")
        if self.kind == "store_full" and self.runs != "*":
            raise ValueError(f"runs: found {self.runs!r}; a store belongs to no run, expected '*'")
        return self


class Webhook(_Section):
    """A receiver of raised and cleared alerts."""

    name: Name
    """Name on the page and in metrics, unique."""
    url: Annotated[str, Field(max_length=2_000)]
    """Address that receives a POST for each alert; http or https. Redirects are not followed."""
    secret_file: Path | None = None
    """File with the secret: ``whsec_`` and at least 24 bytes in base64."""
    secret_env: str | None = None
    """Environment variable with the secret, instead of the file."""
    min_severity: AlertSeverity = "warning"
    """Minimum severity of the alerts that are sent."""

    @field_validator("url")
    @classmethod
    def _is_http(cls, url: str) -> str:
        # The message has no URL: a receiver's path may be a secret.
        try:
            parts = urlsplit(url)
            valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            valid = False
        if not valid or not url.isascii() or not url.isprintable() or " " in url:
            raise ValueError("expected http://... or https://... with a host")
        if parts.username is not None:
            raise ValueError("found a user name; expected a URL without one")
        return url

    @model_validator(mode="after")
    def _has_a_secret(self) -> Self:
        if (self.secret_file is None) == (self.secret_env is None):
            raise ValueError("expected either secret_file or secret_env")
        return self

    def secret(self) -> bytes:
        """Return the key of the signatures.

        Raises ValueError if there is no valid secret. The message does not contain it.
        """
        if self.secret_file is not None:
            source = f"secret_file {str(self.secret_file)!r}"
            try:
                text = self.secret_file.read_bytes().decode("utf-8", errors="replace")
            except OSError as error:
                raise ValueError(f"{source}: {error.strerror}") from None
        else:
            source = f"secret_env {self.secret_env!r}"
            text = os.environ.get(self.secret_env or "", "")
        try:
            key = base64.b64decode(text.strip().removeprefix("whsec_"), validate=True)
        except (binascii.Error, ValueError):
            key = b""
        if len(key) < _MIN_SECRET_BYTES:
            raise ValueError(
                f"{source}: expected whsec_ and at least {_MIN_SECRET_BYTES} bytes in base64; "
                '`echo "whsec_$(openssl rand -base64 32)"` creates one'
            )
        return key


class AlertRules(_Section):
    """Content of the file of ``--alert-rules``; without ``rules``, the shipped rules apply."""

    rules: Annotated[tuple[Rule, ...], Field(max_length=_MAX_RULES)]
    webhooks: Annotated[tuple[Webhook, ...], Field(max_length=_MAX_WEBHOOKS)] = ()

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        for what, names in (
            ("rules", [rule.name for rule in self.rules]),
            ("webhooks", [webhook.name for webhook in self.webhooks]),
        ):
            twice = {name for name in names if names.count(name) > 1}
            if twice:
                raise ValueError(f"{what}: the name {min(twice)!r} is used twice")
        return self


def load_rules(path: Path | None = None) -> AlertRules:
    """Return the rules of a file, by default the shipped ones, and check the secrets.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is invalid; the message names it and each problem.
    """
    raw = _read(path or _DEFAULT)
    if "rules" not in raw:
        raw["rules"] = _read(_DEFAULT)["rules"]
    try:
        rules = AlertRules.model_validate(raw)
    except ValidationError as error:
        problems = "; ".join(_problem(item) for item in error.errors(include_url=False))
        raise ValueError(f"{path}: {problems}") from None
    for webhook in rules.webhooks:
        try:
            webhook.secret()
        except ValueError as error:
            raise ValueError(f"{path}: webhook {webhook.name}: {error}") from None
    return rules


def rules_schema() -> dict[str, Any]:
    """Return the JSON schema of the file, for an editor's checks and completion."""
    schema = AlertRules.model_json_schema()
    schema.pop("required", None)  # `load_rules` adds the shipped rules
    return schema


def _read(path: Path) -> dict[str, Any]:
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: found {type(raw).__name__}; expected a mapping")
    return raw


def _problem(item: Any) -> str:
    location = ".".join(str(part) for part in item["loc"]) or "file"
    if item["type"] == "extra_forbidden":
        return f"{location}: unknown key"
    if item["type"] == "missing":
        return f"{location}: missing"
    if item["type"] == "value_error":
        return f"{location}: {item['ctx']['error']}"
    shown = item["input"]
    if isinstance(shown, float) and not math.isfinite(shown):
        shown = str(shown)
    return f"{location}: found {str(shown)[:100]!r}; {item['msg']}"
