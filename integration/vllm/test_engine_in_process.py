"""The refit engine inside vLLM's `LLM`, compared with a fresh vLLM of the new weights.

Imports internals: vLLM loads no plugins here, and layers are loaded one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import vllm
from integration.vllm.in_process import Answers, answers, start, status, update
from integration.vllm.published import Trainer, checkpoint, shards_of
from integration.vllm.tiny_model import save_tiny_model
from vllm import LLM
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from refit_mx import (
    FencedError,
    LayoutError,
    PhaseError,
    RefitConfigError,
    RefitTimeoutError,
    TensorSpec,
    VersionNotFoundError,
)

# vLLM calls these in its own processes; the tests call them in this one.
from refit_mx.engine.layerwise import LayerwiseReload
from refit_mx.engine.registration import plugin, register


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(False, id="untied"),
        # test_engine_models.py also refits a model with tied embeddings.
        pytest.param(True, id="tied", marks=pytest.mark.long),
    ],
)
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [save_tiny_model(folder / str(seed), seed=seed, tied=request.param) for seed in range(3)]


@pytest.fixture(scope="module")
def references(folders: list[Path]) -> list[Answers]:
    return [answers(start(folder)) for folder in folders]


@pytest.fixture(scope="module")
def llm(folders: list[Path], references: list[Answers]) -> LLM:
    return start(folders[0])


@pytest.fixture
def trainer(llm: LLM) -> Iterator[Trainer]:
    """Yield a trainer that the engine is connected to."""
    with Trainer("tiny", slots=3) as trainer:
        llm.init_weight_transfer_engine({"init_info": trainer.init_info()})
        yield trainer


@pytest.fixture
def serving(folders: list[Path], references: list[Answers], llm: LLM, trainer: Trainer) -> LLM:
    """Return an engine that serves the weights of seed 0 as version ``v0``."""
    trainer.publish("v0", checkpoint(folders[0]))
    update(llm, "v0")
    assert answers(llm) == references[0]
    return llm


@pytest.mark.parametrize("transport", ["shm", "nixl", "tcp"])
def test_refitted_engine_answers_like_a_fresh_vllm(folders, references, llm, trainer, transport):
    llm.init_weight_transfer_engine({"init_info": trainer.init_info(transport=transport)})
    for seed in (1, 2, 0):
        trainer.publish(f"v{seed}", checkpoint(folders[seed]))
        update(llm, f"v{seed}")
        assert answers(llm) == references[seed]
        assert status(llm)["version_id"] == f"v{seed}"


def test_old_weights_serve_during_a_background_fetch(folders, references, serving, trainer):
    trainer.publish("v1", checkpoint(folders[1]))
    serving.start_weight_update()
    serving.update_weights({"update_info": {"version_id": "v1", "background": True}})
    assert answers(serving) == references[0]
    serving.update_weights({"update_info": {"version_id": "v1"}})
    assert status(serving)["fetch"]["state"] == "received"
    assert answers(serving) == references[0]
    serving.finish_weight_update()
    assert answers(serving) == references[1]


def remove_tensor(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.1.mlp.up_proj.weight"]


def add_row(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.0.self_attn.o_proj.weight"
    tensors[name] = torch.cat([tensors[name], tensors[name][:1]])


def add_unknown_tensor(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.self_attn.other_proj.weight"] = torch.zeros(3)


@pytest.mark.parametrize(
    ("spoil", "names", "known"),
    [
        (remove_tensor, "up_proj", True),
        (remove_tensor, "up_proj", False),
        (add_row, "o_proj", True),
        (add_row, "o_proj", False),
        (add_unknown_tensor, "other_proj", True),
        (add_unknown_tensor, "other_proj", False),
    ],
)
def test_wrong_tensor_is_refused_by_name_and_changes_nothing(
    folders, references, serving, trainer, spoil, names, known
):
    if not known:
        info = trainer.init_info(attempts=1)
        serving.init_weight_transfer_engine({"init_info": info})
    tensors = checkpoint(folders[1])
    spoil(tensors)
    trainer.publish("spoilt", tensors)
    for _ in range(2):  # every time, not only when the layout is derived
        serving.start_weight_update()
        with pytest.raises(LayoutError, match=names):
            serving.update_weights({"update_info": {"version_id": "spoilt"}})
        assert answers(serving) == references[0]
    trainer.publish("v1", checkpoint(folders[1]))
    update(serving, "v1")
    assert answers(serving) == references[1]


def test_unknown_version_is_refused_and_the_next_update_works(
    folders, references, serving, trainer
):
    serving.start_weight_update()
    with pytest.raises(VersionNotFoundError, match="v9"):
        serving.update_weights({"update_info": {"version_id": "v9"}})
    assert answers(serving) == references[0]
    trainer.publish("v1", checkpoint(folders[1]))
    update(serving, "v1")
    assert answers(serving) == references[1]


@pytest.mark.parametrize("call", [1, 3])
def test_failed_install_fences_until_an_update_succeeds(
    folders, references, serving, trainer, monkeypatch, call
):
    trainer.publish("v1", checkpoint(folders[1]))
    serving.start_weight_update()
    serving.update_weights({"update_info": {"version_id": "v1"}})
    calls = 0
    process = UnquantizedLinearMethod.process_weights_after_loading

    def fail(self: UnquantizedLinearMethod, layer: torch.nn.Module) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            raise MemoryError("no memory to pack into")
        process(self, layer)

    with monkeypatch.context() as patch:
        patch.setattr(UnquantizedLinearMethod, "process_weights_after_loading", fail)
        with pytest.raises(FencedError, match="no memory to pack into"):
            serving.finish_weight_update()
    assert "v1" in status(serving)["fenced"]
    # vLLM's session stays open after a finish that raises; the next finish ends it.
    serving.finish_weight_update()
    update(serving, "v1")
    assert status(serving)["fenced"] is None
    assert answers(serving) == references[1]


def test_finish_without_an_update_installs_nothing(references, serving):
    serving.start_weight_update()
    serving.finish_weight_update()
    assert answers(serving) == references[0]
    assert status(serving)["version_id"] == "v0"


@pytest.mark.parametrize("published", [True, False])
def test_finish_installs_the_requested_version_or_raises(
    folders, references, serving, trainer, published
):
    if published:
        trainer.publish("v1", checkpoint(folders[1]))
    serving.start_weight_update()
    serving.update_weights({"update_info": {"version_id": "v1", "background": True}})
    if not published:
        while status(serving)["fetch"]["state"] == "running":
            pass
    # The background fetch of the published version may or may not be complete by now.
    try:
        serving.finish_weight_update()
        installed = True
    except PhaseError:
        serving.finish_weight_update()
        installed = False
    assert not installed or published
    assert answers(serving) == references[int(installed)]
    assert status(serving)["version_id"] == f"v{int(installed)}"


def test_later_versions_do_not_change_the_installed_one(folders, references, serving, trainer):
    trainer.publish("v1", checkpoint(folders[1]))
    serving.start_weight_update()
    serving.update_weights({"update_info": {"version_id": "v1"}})
    trainer.publish("v2", checkpoint(folders[2]))  # into the memory of v0
    publisher, slots = trainer.publishers[0], ["fsdp-0"]
    trainer.control.create_version("tiny", slots, idempotency_key="v3", version_id="v3")
    with pytest.raises(RefitTimeoutError, match="'v1' is leased"):
        publisher.publish("v3", shards_of(checkpoint(folders[2]), 0, 1), timeout_s=1)
    serving.finish_weight_update()
    assert answers(serving) == references[1]
    assert status(serving)["version_id"] == "v1"


def test_abort_drops_the_fetched_version(folders, references, serving, trainer):
    trainer.publish("v1", checkpoint(folders[1]))
    serving.start_weight_update()
    serving.update_weights({"update_info": {"version_id": "v1"}})
    serving.update_weights({"update_info": {"abort": True}})
    serving.finish_weight_update()
    assert answers(serving) == references[0]


def test_restarted_trainer_takes_over_during_a_session(folders, references, serving):
    serving.start_weight_update()
    with Trainer("tiny") as restarted:
        restarted.publish("v2", checkpoint(folders[2]))
        serving.init_weight_transfer_engine({"init_info": restarted.init_info()})
        serving.update_weights({"update_info": {"version_id": "v2"}})
        serving.finish_weight_update()
        assert answers(serving) == references[2]


def test_released_engine_can_be_initialized_again(folders, references, serving, trainer):
    serving.collective_rpc("shutdown_weight_transfer_engine")
    assert status(serving)["initialized"] is False
    assert status(serving)["version_id"] == "v0"
    trainer.publish("v1", checkpoint(folders[1]))
    serving.init_weight_transfer_engine({"init_info": trainer.init_info()})
    update(serving, "v1")
    assert answers(serving) == references[1]


def test_errors_as_status_are_not_raised(folders, references, serving, trainer):
    serving.init_weight_transfer_engine({"init_info": trainer.init_info(errors="status")})
    serving.start_weight_update()
    serving.update_weights({"update_info": {"version_id": "v9"}})
    reported = status(serving)
    assert reported["fetch"]["state"] == "failed"
    assert "v9" in reported["fetch"]["error"]
    assert reported["session"] is True
    serving.finish_weight_update()
    assert status(serving)["version_id"] == "v0"
    assert answers(serving) == references[0]


def test_draft_model_is_refused(serving):
    with pytest.raises(RuntimeError, match="does not support draft"):
        serving.llm_engine.collective_rpc("start_draft_weight_update")
    assert status(serving)["session"] is False


def test_status_has_the_nonce_and_vllms_version(serving):
    reported = status(serving)
    assert (reported["nonce"], reported["backend"], reported["rank"]) == ("n", "mx", 0)
    assert reported["vllm"] == vllm.__version__


def test_only_a_vocabulary_accepts_fewer_rows(serving):
    def refusals(model: torch.nn.Module) -> dict[str, str]:
        reload = LayerwiseReload(model, SimpleNamespace(enforce_eager=True))
        specs = {
            name: TensorSpec(name, "float32", tuple(tensor.shape))
            for prefix, layer in model.named_modules()
            for leaf, tensor in get_layerwise_info(layer).restore_metadata[0].items()
            for name in [f"{prefix}.{leaf}"]
        }
        errors = {}
        for name in ("model.embed_tokens.weight", "model.layers.0.self_attn.qkv_proj.weight"):
            rows, *rest = specs[name].shape
            fewer_rows = {**specs, name: TensorSpec(name, "float32", (rows - 1, *rest))}
            try:
                reload.check(fewer_rows)
            except LayoutError as error:
                errors[name] = str(error)
        return errors

    assert list(serving.apply_model(refusals)[0]) == ["model.layers.0.self_attn.qkv_proj.weight"]


@pytest.mark.parametrize("version", ["0.24.0", "0.34.0", "dev"])
def test_backend_is_not_registered_with_another_vllm(monkeypatch, caplog, version):
    monkeypatch.setattr(vllm, "__version__", version)
    with pytest.raises(RefitConfigError, match=rf"{version}.*supports vLLM 0\.25 to 0\.33"):
        register("another")
    plugin()  # does not raise: vLLM continues, and rejects the backend's name
    assert "supports vLLM 0.25 to 0.33" in caplog.text
