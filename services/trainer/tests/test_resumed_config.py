"""The configuration of a resumed run: its checkpoint's, with what the command may change."""

from __future__ import annotations

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_trainer.config import load_config
from grpo_trainer.errors import ConfigurationError
from grpo_trainer.resumed_config import resumed_config

DEMO = load_config().model_dump(mode="json")


def leaves(node, path=""):
    for name, value in node.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def every_key(node, path=""):
    for name, value in node.items():
        yield f"{path}{name}"
        if isinstance(value, dict) and name != "model":
            yield from every_key(value, f"{path}{name}.")


def another(value):
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    return {"other": 1.0} if isinstance(value, dict) else "other"


LEAVES = {**dict(leaves(DEMO)), "data_plane.claim_lease_s": None, "data_plane.claim_order": None}
FREE = {
    "cluster.address",
    "cluster.call_timeout_s",
    "cluster.nodes_timeout_s",
    "cluster.num_cpus",
    "cluster.placement.environment",
    "cluster.placement.generation",
    "cluster.placement.policy",
    "cluster.placement.rollout",
    "cluster.temp_dir",
    "refit.advertised_host",
    "refit.control",
    "refit.control_access.tls_ca",
    "refit.control_access.tls_name",
    "refit.control_access.token_env",
    "refit.control_access.token_file",
    "refit.generation_tensor_parallel",
    "refit.host",
    "refit.timeout_s",
    "refit.transport",
    "tracing.enabled",
    "tracing.endpoint",
    "tracing.verbose",
    "checkpointing.every_steps",
    "checkpointing.keep_last",
    "validation.batch_size",
    "validation.every_steps",
    "grpo.num_steps",
    "env.step_timeout_s",
    "policy.micro_batch_size",
    "policy.dynamic_batching.max_tokens_per_microbatch",
    "data_plane.ack_timeout_ms",
    "data_plane.claim_lease_s",
    "data_plane.claim_meta_poll_interval_s",
    "data_plane.global_segment_size",
    "data_plane.local_buffer_size",
    "data_plane.num_storage_units",
    "data_plane.observability.enabled",
    "data_plane.storage_capacity",
    "data_plane.unit_resources",
}


@pytest.mark.parametrize("key", sorted({*LEAVES, *FREE}))
def test_a_key_that_changes_what_is_computed_is_refused_by_name_and_no_other(key):
    override = f"{key}={json.dumps(another(LEAVES[key]))}"
    free = key in FREE
    told = ""
    try:
        resumed_config(DEMO, [override], source="checkpoint")
    except ConfigurationError as error:
        told = str(error)  # of a key that may change: that the other value does not fit
    refused = told.startswith(f"{key}: found {another(LEAVES[key])!r}; a resumed run keeps ")
    assert refused != free, told


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("policy.global_batch_size=64", "keeps 128: it changes what is computed"),
        ("run.seed=18", "keeps 17: a run keeps its name, folder and seed"),
        ("data.train=mine.jsonl", "keeps None: a run keeps its prompts"),
        ("data_plane.backend=simple", "keeps 'packed': only its sizes, "),
        ("policy.dynamic_batching={enabled: true}", "enabled: found True; a resumed run keeps"),
        ("grpo.num_stepz=3", "--set grpo.num_stepz=3: the configuration has no key"),
    ],
)
def test_a_refusal_says_why(override, told):
    with pytest.raises(ConfigurationError) as refused:
        resumed_config(DEMO, [override], source="checkpoint")
    assert told in str(refused.value)


def test_what_ends_runs_that_are_too_small_can_be_raised():
    overrides = [
        "cluster.call_timeout_s=900",
        "data_plane.storage_capacity=16384",
        "data_plane.global_segment_size=1073741824",
        "data_plane.ack_timeout_ms=120000",
        "data_plane.claim_lease_s=30",
        "policy.micro_batch_size=32",
        "policy.dynamic_batching.max_tokens_per_microbatch=4096",
        "refit={control: '10.0.0.2:50051', control_access: {tls_ca: null, tls_name: null, "
        "token_file: null, token_env: null}, host: node, advertised_host: null, transport: tcp, "
        "generation_tensor_parallel: 1, timeout_s: 10}",
        "grpo.num_steps=90",
        "policy.global_batch_size=128",  # as it is
    ]
    config = resumed_config(DEMO, overrides, source="checkpoint").config
    assert config.cluster.call_timeout_s == 900
    assert config.data_plane["storage_capacity"] == 16384
    assert config.data_plane["claim_lease_s"] == 30
    assert config.refit.control == "10.0.0.2:50051"
    assert config.grpo.num_steps == 90


@given(st.data())
def test_keys_that_an_older_checkpoint_lacks_take_the_shipped_values(data):
    saved = copy.deepcopy(DEMO)
    removed = data.draw(st.lists(st.sampled_from(sorted(every_key(DEMO))), max_size=4, unique=True))
    gone = {}
    for key in sorted(removed, key=len, reverse=True):
        *parents, leaf = key.split(".")
        node = saved
        for parent in parents:
            node = node[parent]
        for below in [name for name in gone if name.startswith(f"{key}.")]:
            del gone[below]
        del node[leaf]
        gone[key] = None
    resumed = resumed_config(saved, [], source="checkpoint")
    assert resumed.added.keys() == gone.keys()
    assert resumed.config.model_dump(mode="json") == DEMO


def test_a_model_of_another_kind_gets_no_key_of_the_shipped_one():
    saved = copy.deepcopy(DEMO)
    saved["policy"]["model"] = {"kind": "pretrained", "name": "a/b", "use_chat_template": True}
    resumed = resumed_config(saved, [], source="checkpoint")
    assert not resumed.added
    assert resumed.config.policy.model.name == "a/b"
