"""`SyncRolloutActor`: one step's generation, from prompts to columns in the data plane.

Callers may rely on the order of operations in `SyncRolloutActor.rollout_to_tq`. Checks run before
generation where possible, otherwise before the put. After the put, only the backend's final calls
can fail. If such a call fails, or if the result of the put is unknown, the samples are withdrawn.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any  # Any: configuration, columns and metrics are the caller's own values

import torch
from opentelemetry.trace import SpanKind

from column_io import BatchedDataDict, kv_first_write
from dataplane_core import (
    ClosedError,
    ConfigError,
    DataPlaneError,
    DeadlineExceededError,
    InvalidRequestError,
    KVBatchMeta,
    UnavailableError,
    build_data_plane_client,
)
from dataplane_core.documented_client import as_client
from dataplane_core.meta import lease_token
from dataplane_core.telemetry import attached, span
from rollout_actor.environment_step import check_tasks
from rollout_actor.flatten import flatten_rollout_message_log
from rollout_actor.interfaces import EnvironmentInterface, GenerationInterface, TokenizerInterface
from rollout_actor.media import (
    MediaForms,
    check_declared,
    check_media,
    count_rollouts,
    media_forms,
    stored_media,
)
from rollout_actor.ray_class import RayClass
from rollout_actor.rollout import run_async_multi_turn_rollout, run_multi_turn_rollout
from rollout_actor.settings import RolloutSettings
from rollout_actor.step_columns import (
    bulk_columns,
    carry_columns,
    check_carry_keys,
    check_columns,
    check_input,
    find_partition,
)


class SyncRolloutActor(RayClass):
    """Actor that runs rollouts and writes their bulk data to the data plane.

    ``SyncRolloutActor(...)`` works in the caller's process; ``SyncRolloutActor.remote(...)`` and
    ``SyncRolloutActor.options(...).remote(...)`` start it as a Ray actor.

    Args:
        policy_generation: the backend. The Ray form sends it to the actor, so it should hold
            handles, not weights.
        tokenizer: the policy's tokenizer.
        task_to_env: task name to environment.
        master_config: nested mappings; see `rollout_actor.settings.RolloutSettings` for the keys.
        dp_cfg: a `dataplane_core.DataPlaneConfig` of a running store, to which the actor attaches.

    Raises:
        ConfigError: (a ValueError) a key is missing or invalid, the actor cannot attach to the
            store, or the configuration requires an asynchronous engine and the backend has no
            ``generate_async``.
        UnsupportedError: (a NotImplementedError) ``env.should_use_nemo_gym`` is on.
    """

    def __init__(
        self,
        policy_generation: GenerationInterface,
        tokenizer: TokenizerInterface,
        task_to_env: dict[str, EnvironmentInterface],
        master_config: Any,
        dp_cfg: dict[str, Any],
    ) -> None:
        self.policy_generation = policy_generation
        self.tokenizer = tokenizer
        self.task_to_env = task_to_env
        self.master_config = master_config
        self._settings = RolloutSettings.from_master_config(master_config)
        if self._settings.async_generation and not hasattr(policy_generation, "generate_async"):
            raise ConfigError(
                "master_config: policy.generation requires an asynchronous engine, but "
                f"{type(policy_generation).__name__} has no generate_async; set async_engine to "
                "false"
            )
        self._dp_client = as_client(build_data_plane_client(dp_cfg, bootstrap=False))
        self._media: MediaForms = {}
        self._closed = False

    def rollout_to_tq(
        self,
        input_batch: BatchedDataDict[Any],
        *,
        partition_id: str,
        group_size: int = 1,
        first_iter: bool = True,
        finish_generation: bool = True,
        task_to_env_override: dict[str, EnvironmentInterface] | None = None,
        carry_keys: list[str] | None = None,
        carrier: Mapping[str, str] | None = None,
        claim: KVBatchMeta | None = None,
    ) -> tuple[KVBatchMeta, dict[str, Any], dict[str, Any], dict[str, Any] | None]:
        """Generate, flatten and put one batch; return its meta and the driver's columns.

        In order: ``snapshot_step_metrics`` (if ``first_iter``), ``clear_logger_metrics``, rollout,
        flatten, one put, ``finish_generation``, ``get_logger_metrics``.

        If an operation up to the put raises, ``finish_generation`` is still called, if requested.
        If a later operation raises, or the result of the put is unknown, new samples are withdrawn,
        even leased ones. Blocking claims then wait for the samples of a retry. Samples of ``claim``
        are never withdrawn. If ``finish_generation`` or the withdrawal fails too, the error gets a
        note. New samples remain only if the withdrawal fails.

        Args:
            input_batch: n rows, with each prompt in ``group_size`` consecutive rows.
                ``message_log``: turns with ``role``, ``content`` and ``token_ids`` (int64, 1-D);
                ``length``: tokens of the prompt, int (n,); ``loss_multiplier``: (n,);
                ``task_name``; ``extra_env_info``; optionally ``stop_strings`` and any other
                columns of n rows. The rollout does not change the batch.
            partition_id: a registered partition to put into.
            group_size: rollouts per prompt. A prompt gets one uuid, its rows the suffixes ``_g0``,
                ``_g1`` and so on.
            first_iter: whether this is the first rollout of a step, for which
                ``snapshot_step_metrics`` is called if the backend has it.
            finish_generation: let the backend release its inference state at the end.
            task_to_env_override: environments for this call, instead of ``task_to_env``.
            carry_keys: names of the columns for the driver; None is all but `OPT_IN_CARRY_KEYS`.
            carrier: the caller's trace context, from `dataplane_core.telemetry.inject`.
            claim: a claim of n samples that the rows fill, in this order. The put writes these
                samples instead of new ones, under the claim's lease. They are not withdrawn after
                an error: the caller releases the claim, so that they are generated again.

        Returns:
            A tuple of four:

            - The meta: ``task_name`` is ``partition_id``, ``sequence_lengths`` are set,
                ``extra_info`` has ``rollout_metrics``, and ``pad_to_multiple`` if it is above 1; no
                tags.
            - The driver's columns by name: ``total_reward`` and ``loss_multiplier`` float32 (n,),
                ``truncated`` bool (n,), ``length`` int (n,), ``input_lengths`` int64 (n,),
                ``response_token_lengths`` int64 (n,) (tokens of the first assistant turn that has
                any, even if that turn belongs to the prompt), ``prompt_ids_for_adv`` int64 (n,
                longest prompt) right-padded, reward components that start with "reward/" float32
                (n,); ``weight_versions``, if the backend reports them, objects (n,); on request
                ``turn_roles`` and ``turn_contents``, object arrays (n,) of lists, and
                ``generated_tokens`` int64 (n,), over all turns.
            - The rollout's metrics; see `rollout_actor.metrics.rollout_metrics`.
            - The backend's metrics, as ``get_logger_metrics`` returned them.

        Raises:
            ClosedError: (a RuntimeError) the actor was shut down.
            InvalidRequestError: (a ValueError) before generation: there are no rows, columns differ
                in their number of rows, or ``group_size`` is below 1 or does not divide the rows.
                ``claim`` has another number of samples, is of another partition or has no lease. A
                task has no environment, a ``length`` exceeds the row's tokens, a
                ``loss_multiplier`` is not finite, or media of one name differ in dtype or
                dimensions.
            PartitionNotFoundError, SchemaMismatchError: before generation, if the store can be
                inspected: there is no such partition, or it holds a column in another dtype, media
                of other dimensions, or samples without media that this batch has. With any store:
                media differ from ``policy.media``.
            MissingDataError: (a KeyError and a ValueError) before generation: a column is missing,
                or a carry key is unknown; before the put: a "reward/" key or
                ``weight_versions`` does not exist, or ``routed_experts`` is missing.
            DeadlineExceededError: (a TimeoutError) an environment's step times out; names its task.
            UnavailableError: (a RuntimeError) an environment is dead; names its task.
            LeaseLostError: the lease of ``claim`` ended before the put; nothing is written.
            DataPlaneError: as ``put_samples``.
        """
        with attached(carrier), span("rollout_to_tq", kind=SpanKind.SERVER):
            if self._closed:
                raise ClosedError("rollout_to_tq: the actor was shut down; create a new one")
            rows = check_input(input_batch, group_size=group_size)
            check_carry_keys(carry_keys)
            environments = self.task_to_env
            if task_to_env_override is not None:
                environments = task_to_env_override
            check_tasks(input_batch["task_name"], environments)
            if claim is not None:
                _check_claim(claim, rows, partition_id)
            media = self._check_columns(input_batch, partition_id)
            generation = self.policy_generation
            sample_ids = _new_sample_ids(rows, group_size) if claim is None else claim.sample_ids
            try:
                if first_iter and hasattr(generation, "snapshot_step_metrics"):
                    generation.snapshot_step_metrics()
                generation.clear_logger_metrics()
                final_batch, metrics = self._roll_out(input_batch, environments, group_size)
                with span("flatten", "overhead"):
                    payload, input_lengths, flattened = flatten_rollout_message_log(
                        final_batch["message_log"],
                        torch.as_tensor(final_batch["length"]),
                        pad_token_id=self.tokenizer.pad_token_id,
                        make_sequence_length_divisible_by=self._settings.pad_to_multiple,
                        routed_experts=self._settings.router_replay,
                        media=self._current_media(media, partition_id),
                    )
                    carry = carry_columns(
                        final_batch, flattened, input_lengths, carry_keys=carry_keys
                    )
                    bulk = bulk_columns(
                        final_batch, payload, input_lengths, input_columns=list(input_batch)
                    )
                try:
                    meta = kv_first_write(
                        bulk,
                        sample_ids=sample_ids,
                        dp_client=self._dp_client,
                        partition_id=partition_id,
                        extra_info={"rollout_metrics": metrics},
                        task_name=partition_id,
                        pad_to_multiple=self._settings.pad_to_multiple,
                        claim=claim,
                    )
                except BaseException as error:  # an interrupt can arrive after the put
                    if claim is None and not _is_refusal(error):
                        self._withdraw(sample_ids, partition_id, error)
                    raise
            except BaseException as error:  # the engine keeps its memory until finish_generation
                if finish_generation:
                    with _add_error_as_note(error, "finish_generation failed as well"):
                        generation.finish_generation()
                raise
            try:
                if finish_generation:
                    generation.finish_generation()
                return meta, carry, metrics, generation.get_logger_metrics()
            except BaseException as error:  # a retry uses other ids, so withdraw these
                if claim is None:
                    self._withdraw(sample_ids, partition_id, error)
                raise

    def _check_columns(self, input_batch: BatchedDataDict[Any], partition_id: str) -> MediaForms:
        """Refuse columns that the put would refuse, as far as they are known before generation.

        Returns:
            The media of this batch, the configuration and the partition, and those of earlier
            batches that fit the partition. A row that lacks one of them is put with zero items of
            it, so that all rows can be read together.
        """
        media, declared = media_forms(input_batch["message_log"]), self._settings.media
        check_declared(media, declared)
        partition = find_partition(self._dp_client, partition_id)
        stored: MediaForms = {}
        kinds: dict[str, str | None] = {}
        if partition is not None:
            columns = {name: str(form.dtype) for name, form in (declared | media).items()}
            check_columns(partition, input_batch, columns)
            stored = stored_media(self._dp_client, partition)
            check_media(partition, media, stored, declared)
            kinds = {field.name: field.kind for field in partition.fields}
        # Samples of earlier rollouts have exactly the media in ``stored``. Only before the first
        # rollout may media of earlier batches be added.
        if partition is None or not count_rollouts(partition):
            for name, form in self._media.items():
                if kinds.get(name) in (None, str(form.dtype)):
                    stored.setdefault(name, form)
        self._media |= media
        return stored | declared | media

    def _current_media(self, media: MediaForms, partition_id: str) -> MediaForms:
        """Return ``media`` and the media that other actors put during generation."""
        partition = find_partition(self._dp_client, partition_id)
        return media if partition is None else stored_media(self._dp_client, partition) | media

    def _withdraw(self, sample_ids: list[str], partition_id: str, error: BaseException) -> None:
        """Withdraw samples whose ids the caller does not get; a retry uses other ids."""
        count = len(sample_ids)
        note = f"the {count} samples put into partition {partition_id!r} may still be there"
        with _add_error_as_note(error, note):
            self._dp_client.withdraw_samples(sample_ids, partition_id)

    def _roll_out(
        self,
        input_batch: BatchedDataDict[Any],
        task_to_env: Mapping[str, EnvironmentInterface],
        group_size: int,
    ) -> tuple[BatchedDataDict[Any], dict[str, Any]]:
        settings = self._settings
        run: Any = (  # the constructor checked that the backend has generate_async
            run_async_multi_turn_rollout if settings.async_generation else run_multi_turn_rollout
        )
        result: tuple[BatchedDataDict[Any], dict[str, Any]] = run(
            self.policy_generation,
            input_batch,
            self.tokenizer,
            task_to_env,
            max_seq_len=settings.max_seq_len,
            max_rollout_turns=settings.max_turns,
            max_new_tokens=settings.max_new_tokens,
            step_timeout_s=settings.step_timeout_s,
            media_group_size=group_size if settings.share_group_media else 1,
        )
        return result

    def shutdown(self) -> None:
        """Detach from the data plane; calling it twice is allowed."""
        self._closed = True
        self._dp_client.close()


@contextmanager
def _add_error_as_note(error: BaseException, note: str) -> Iterator[None]:
    """Turn an error of the block into a note on ``error``."""
    try:
        yield
    except Exception as another:  # noqa: BLE001  # the caller raises the first error
        error.add_note(f"{note}: {type(another).__name__}: {another}")


def _is_refusal(error: BaseException) -> bool:
    """Return whether a put that raised ``error`` certainly stored nothing."""
    unknown = (ClosedError, DeadlineExceededError, UnavailableError)
    return isinstance(error, DataPlaneError) and not isinstance(error, unknown)


def _check_claim(claim: KVBatchMeta, rows: int, partition_id: str) -> None:
    if claim.size != rows:
        raise InvalidRequestError(
            f"rollout_to_tq: a claim of {claim.size} samples for {rows} rows; expected one "
            "sample per row"
        )
    if claim.partition_id != partition_id:
        raise InvalidRequestError(
            f"rollout_to_tq: a claim of partition {claim.partition_id!r}; expected one of "
            f"partition {partition_id!r}, into which the rollout puts"
        )
    lease_token(claim)


def _new_sample_ids(rows: int, group_size: int) -> list[str]:
    prompts = [str(uuid.uuid4()) for _ in range(rows // group_size)]
    return [f"{prompt}_g{number}" for prompt in prompts for number in range(group_size)]
