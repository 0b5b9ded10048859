"""`SyncRolloutActor` in this process: order, refusals, what is put and what is carried."""

import re
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rollout_doubles import (
    DP_CFG,
    Adder,
    Arithmetic,
    AsyncAdder,
    CharTokenizer,
    Local,
    Method,
    PlainAdder,
    Scripted,
    batch_of,
    config,
    logprobs_of,
    tokens_of,
    turn,
)

from column_io import read_columns
from dataplane_core import (
    CapacityExceeded,
    ClosedError,
    ConfigError,
    InMemoryDataPlaneClient,
    MissingDataError,
    UnsupportedError,
)
from dataplane_core.testing import MinimalClient
from rollout_actor import OPT_IN_CARRY_KEYS, SyncRolloutActor

CARRY = [
    "total_reward",
    "loss_multiplier",
    "truncated",
    "length",
    "input_lengths",
    "prompt_ids_for_adv",
    "response_token_lengths",
]


def nothing_is_put(store):
    return store.inspector.count_samples("train", "train", []).put == 0


# Order


def test_the_steps_and_one_put_come_in_the_documented_order(actor_of, store, monkeypatch):
    generator = Adder()
    actor = actor_of(generator)
    put = InMemoryDataPlaneClient.put_samples

    def recorded(self, *args, **kwargs):
        generator.events.append("put")
        return put(self, *args, **kwargs)

    monkeypatch.setattr(InMemoryDataPlaneClient, "put_samples", recorded)
    meta, *_, metrics = actor.rollout_to_tq(batch_of(["1+2="] * 4), partition_id="train")
    assert generator.events == ["snapshot", "clear", "generate", "put", "finish", "metrics"]
    assert [sample.sample_id for sample in store.inspector.list_samples("train")] == meta.sample_ids
    assert metrics == {"calls": 1}


def test_snapshots_are_taken_in_the_first_iteration_only(actor_of):
    generator = Adder()
    actor_of(generator).rollout_to_tq(batch_of(["1+2="]), partition_id="train", first_iter=False)
    assert "snapshot" not in generator.events


def test_a_backend_without_snapshots_is_fine(actor_of):
    _, carry, _, metrics = actor_of(PlainAdder()).rollout_to_tq(
        batch_of(["1+2="]), partition_id="train"
    )
    assert carry["total_reward"].tolist() == [1.0]
    assert metrics == {"calls": 1}


def test_generation_stays_open_without_finish_generation(actor_of):
    generator = Adder()
    actor_of(generator).rollout_to_tq(
        batch_of(["1+2="]), partition_id="train", finish_generation=False
    )
    assert generator.events == ["snapshot", "clear", "generate", "metrics"]


# Refusals


def batch_without(name):
    batch = batch_of(["1+2="])
    del batch[name]
    return batch


def batch_with(column):
    return batch_of(["1+2="] * 2, extra=column)


@pytest.mark.parametrize(
    ("batch", "options", "message"),
    [
        (batch_of(["1+2="] * 3), {"group_size": 0}, "group_size is 0"),
        (batch_of(["1+2="] * 3), {"group_size": -1}, "group_size is -1"),
        (batch_of(["1+2="] * 3), {"group_size": 2}, "groups of 2"),
        (batch_of([]), {}, "0 rows"),
        (batch_of(["1+2="], tasks="chess"), {}, "no environment for task 'chess'.*'sum'"),
        (batch_of(["1+2="]), {"task_to_env_override": {}}, "task_to_env has none"),
        (batch_without("loss_multiplier"), {}, "no 'loss_multiplier'"),
        (batch_of(["1+2="], length=[5]), {}, "length of row 0 is 5; expected 1 to 4"),
        (batch_of(["1+2="], length=[0]), {}, "length of row 0 is 0; expected 1 to 4"),
        (batch_of([""], length=[3]), {}, "length of row 0 is 3; expected 0, the tokens of"),
        (batch_of(["1+2="], length=torch.tensor([4.0])), {}, r"length\[0\] is 4.0"),
        (batch_of(["1+2="], length=torch.tensor([[4]])), {}, "length is tensor"),
        (batch_of(["1+2="], loss_multiplier=[float("nan")]), {}, "loss_multiplier.*nan"),
        (batch_of(["1+2="], loss_multiplier=[[1.0]]), {}, r"loss_multiplier of shape \(1, 1\)"),
        (batch_of(["1+2="], loss_multiplier=["x"]), {}, "loss_multiplier is .*1 numbers"),
        (batch_with([1]), {}, "column 'extra' has 1 rows; expected 2"),
        (batch_with(7), {}, "column 'extra' has no rows; expected 2"),
        (batch_with("ab"), {}, "column 'extra' has no rows; expected 2"),
        (batch_with(torch.tensor(2)), {}, "column 'extra' has no rows; expected 2"),
        (batch_with({"a": 1, "b": 2}), {}, "column 'extra' has no rows; expected 2"),
    ],
)
def test_wrong_input_is_refused_before_generation(actor_of, store, batch, options, message):
    generator = Adder()
    with pytest.raises(ValueError, match=message):
        actor_of(generator).rollout_to_tq(batch, partition_id="train", **options)
    assert generator.events == []
    assert nothing_is_put(store)


def test_unknown_carry_key_is_refused_before_generation(actor_of, store):
    generator = Adder()
    with pytest.raises(KeyError) as caught:
        actor_of(generator).rollout_to_tq(
            batch_of(["1+2="]), partition_id="train", carry_keys=["total_reward", "nonsense"]
        )
    assert "carry_keys 'nonsense'" in str(caught.value)
    for name in (*CARRY, *OPT_IN_CARRY_KEYS):
        assert repr(name) in str(caught.value)
    assert generator.events == []
    assert nothing_is_put(store)


def test_unknown_reward_component_is_refused_before_the_put(actor_of, store):
    env = Scripted(lambda log, info: {"reward": {"reward/right": 1.0}})
    generator = Adder()
    with pytest.raises(KeyError, match=r"'reward/wrong'.*'reward/right'"):
        actor_of(generator, env).rollout_to_tq(
            batch_of(["1+2="]), partition_id="train", carry_keys=["reward/wrong"]
        )
    assert generator.events == ["snapshot", "clear", "generate", "finish"]
    assert nothing_is_put(store)


class Broken(Adder):
    def generate(self, data, *, greedy):
        raise ZeroDivisionError("oh")


def fail(log, info):
    raise ZeroDivisionError("oh")


@pytest.mark.parametrize("generator", [Adder(), Broken()], ids=["environment", "backend"])
@pytest.mark.parametrize("finish", [True, False])
def test_failure_puts_nothing_and_finishes_generation(actor_of, store, generator, finish):
    generator.events.clear()
    with pytest.raises(ZeroDivisionError, match="oh"):
        actor_of(generator, Scripted(fail)).rollout_to_tq(
            batch_of(["1+2="]), partition_id="train", finish_generation=finish
        )
    generated = [] if isinstance(generator, Broken) else ["generate"]
    assert generator.events == ["snapshot", "clear", *generated, *["finish"] * finish]
    assert nothing_is_put(store)


def test_a_refused_put_finishes_generation():
    cfg = DP_CFG | {"storage_capacity": 1, "ack_timeout_ms": 10}
    generator = Adder()
    with InMemoryDataPlaneClient(cfg) as store:
        store.register_partition("train", ["input_ids"], 2, ["train"])
        actor = SyncRolloutActor(
            generator, CharTokenizer(), {"sum": Local(Arithmetic())}, config(), cfg
        )
        with pytest.raises(CapacityExceeded):
            actor.rollout_to_tq(batch_of(["1+2="] * 2), partition_id="train")
    assert generator.events[-1] == "finish"


# The put


def test_bulk_columns_are_put_and_rewards_are_not(actor_of, store):
    env = Scripted(lambda log, info: {"reward": {"reward/right": 1.0, "style": 2.0}})
    batch = batch_of(["1+2=", "13+4="], loss_multiplier=torch.tensor([1.0, 0.0]))
    meta, *_ = actor_of(env=env).rollout_to_tq(batch, partition_id="train")
    assert sorted(meta.fields) == sorted(
        [
            "input_ids",
            "input_lengths",
            "generation_logprobs",
            "token_mask",
            "sample_mask",
            "content",
            "turn_lengths",
            "turn_roles",
            "turn_contents",
            "task_name",
            "extra_env_info",
            "idx",
        ]
    )
    columns = read_columns(store, meta, meta.fields)
    texts = ["1+2=3. So it is.", "13+4=17. So it is."]
    for row, text in enumerate(texts):
        prompt = text.index("=") + 1
        length = len(text)
        assert torch.equal(columns["input_ids"][row, :length], tokens_of(text))
        assert columns["token_mask"][row, :length].tolist() == [0] * prompt + [1] * (
            length - prompt
        )
        logprobs = columns["generation_logprobs"][row]
        assert not logprobs[:prompt].any()
        assert torch.equal(logprobs[prompt:length], logprobs_of(tokens_of(text[prompt:])))
    assert columns["input_lengths"].tolist() == list(map(len, texts))
    assert columns["sample_mask"].tolist() == [1.0, 0.0]
    assert columns["sample_mask"].dtype == torch.float32
    assert columns["task_name"].tolist() == ["sum", "sum"]
    assert columns["idx"].tolist() == [0, 1]
    assert columns["idx"].dtype == object
    assert columns["extra_env_info"].tolist() == [{"more": []}, {"more": []}]
    assert columns["content"].tolist() == [
        ["1+2=", "3. So it is.", ""],
        ["13+4=", "17. So it is.", ""],
    ]
    assert [log[1]["content"] for log in columns["message_log"]] == [
        "3. So it is.",
        "17. So it is.",
    ]


def test_sample_id_is_uuid_of_prompt_and_suffix_of_rollout(actor_of):
    meta, *_ = actor_of().rollout_to_tq(batch_of(["1+2="] * 6), partition_id="train", group_size=3)
    prompts = [sample_id.rpartition("_")[0] for sample_id in meta.sample_ids]
    assert [sample_id.rpartition("_")[2] for sample_id in meta.sample_ids] == ["g0", "g1", "g2"] * 2
    assert prompts[:3] == [prompts[0]] * 3
    assert prompts[3:] == [prompts[3]] * 3
    assert prompts[0] != prompts[3]
    assert all(
        re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", prompt) for prompt in prompts
    )


def test_the_meta_has_lengths_metrics_and_the_partition_as_task(actor_of):
    meta, carry, metrics, _ = actor_of(multiple=8).rollout_to_tq(
        batch_of(["1+2=", "13+4="]), partition_id="train"
    )
    assert (meta.partition_id, meta.task_name, meta.tags) == ("train", "train", None)
    assert meta.sequence_lengths == carry["input_lengths"].tolist() == [16, 18]
    assert meta.extra_info == {"rollout_metrics": metrics, "pad_to_multiple": 8}
    meta, *_ = actor_of(multiple=1).rollout_to_tq(batch_of(["1+2="]), partition_id="train")
    assert "pad_to_multiple" not in meta.extra_info


def test_tensor_columns_of_the_input_are_put_as_tensors(actor_of, store):
    batch = batch_of(
        ["1+2=", "3+4="],
        idx=torch.tensor([7, 8]),
        score=np.array([0.5, 0.25]),
        tag=np.array(["x", "y"]),
        stop_strings=[None, ["."]],
    )
    meta, *_ = actor_of().rollout_to_tq(batch, partition_id="train")
    columns = read_columns(store, meta, ["idx", "score", "tag", "stop_strings"])
    assert torch.equal(columns["idx"], torch.tensor([7, 8]))
    assert torch.equal(columns["score"], torch.tensor([0.5, 0.25], dtype=torch.float64))
    assert columns["tag"].tolist() == ["x", "y"]
    assert columns["stop_strings"].tolist() == [None, ["."]]


def test_environment_info_is_put_in_its_last_state(actor_of, store):
    env = Scripted(lambda log, info: {"metadata": {"solved": True}})
    meta, *_ = actor_of(env=env).rollout_to_tq(batch_of(["1+2="]), partition_id="train")
    columns = read_columns(store, meta, ["extra_env_info"])
    assert columns["extra_env_info"].tolist() == [{"solved": True}]


class Routed(Adder):
    def generate(self, data, *, greedy):
        output = super().generate(data, greedy=greedy)
        output["routed_experts"] = output["output_ids"][:, :, None, None].expand(-1, -1, 2, 1) % 4
        return output


def test_routed_experts_are_put_for_router_replay(actor_of, store):
    actor = actor_of(Routed(), policy={"router_replay": {"enabled": True}})
    meta, *_ = actor.rollout_to_tq(batch_of(["1+2=", "13+4="]), partition_id="train")
    columns = read_columns(store, meta, ["input_ids", "routed_experts"])
    assert torch.equal(columns["routed_experts"][:, :, 0, 0], columns["input_ids"] % 4)


def test_routed_experts_are_not_put_without_router_replay(actor_of):
    meta, *_ = actor_of(Routed()).rollout_to_tq(batch_of(["1+2="]), partition_id="train")
    assert "routed_experts" not in meta.fields


def test_router_replay_needs_a_backend_that_routes(actor_of, store):
    actor = actor_of(policy={"router_replay": {"enabled": True}})
    with pytest.raises(MissingDataError, match="router_replay"):
        actor.rollout_to_tq(batch_of(["1+2="]), partition_id="train")
    assert nothing_is_put(store)


# The carry


def test_everything_but_the_opt_in_keys_is_carried_by_default(actor_of):
    env = Scripted(lambda log, info: {"reward": {"reward/right": 1.0, "style": 2.0}})
    _, carry, *_ = actor_of(env=env).rollout_to_tq(
        batch_of(["1+2=", "13+4="]), partition_id="train"
    )
    assert sorted(carry) == sorted([*CARRY, "reward/right"])
    assert carry["total_reward"].tolist() == [3.0, 3.0]
    assert carry["reward/right"].tolist() == [1.0, 1.0]
    assert carry["loss_multiplier"].tolist() == [1.0, 1.0]
    assert carry["truncated"].tolist() == [False, False]
    assert carry["truncated"].dtype == torch.bool
    assert carry["length"].tolist() == [4, 5]
    assert carry["input_lengths"].tolist() == [16, 18]
    assert carry["response_token_lengths"].tolist() == [12, 13]
    assert carry["prompt_ids_for_adv"].tolist() == [
        [*tokens_of("1+2=").tolist(), CharTokenizer.pad_token_id],
        tokens_of("13+4=").tolist(),
    ]


def test_only_the_requested_keys_are_carried(actor_of):
    actor = actor_of()
    _, carry, *_ = actor.rollout_to_tq(
        batch_of(["1+2="]), partition_id="train", carry_keys=["total_reward", "turn_roles"]
    )
    assert list(carry) == ["total_reward", "turn_roles"]
    assert carry["turn_roles"].tolist() == [["user", "assistant", "environment"]]
    _, carry, *_ = actor.rollout_to_tq(batch_of(["1+2="]), partition_id="train", carry_keys=[])
    assert carry == {}


def test_lists_and_integers_serve_as_length_and_loss_multiplier(actor_of, store):
    batch = batch_of(["1+2="], length=[4], loss_multiplier=[1])
    meta, carry, *_ = actor_of().rollout_to_tq(batch, partition_id="train")
    assert carry["length"].tolist() == [4]
    assert read_columns(store, meta, ["sample_mask"])["sample_mask"].dtype == torch.float32


def test_assistant_history_is_carried_as_prompt(actor_of, store):
    batch = batch_of(["0+0="])
    batch["message_log"] = [[turn("user", "7+7="), turn("assistant", "14."), turn("user", "1+1=")]]
    batch["length"] = torch.tensor([11])
    meta, carry, *_ = actor_of().rollout_to_tq(batch, partition_id="train")
    assert carry["prompt_ids_for_adv"].tolist() == [tokens_of("7+7=14.1+1=").tolist()]
    mask = read_columns(store, meta, ["token_mask"])["token_mask"]
    assert mask.tolist() == [[0] * 11 + [1] * 12]


# The actor


def test_environments_can_be_given_for_one_call(actor_of):
    actor = actor_of()
    override = {"sum": Scripted(lambda log, info: {"reward": 7.0})}
    _, carry, *_ = actor.rollout_to_tq(
        batch_of(["1+2="]), partition_id="train", task_to_env_override=override
    )
    assert carry["total_reward"].tolist() == [7.0]
    _, carry, *_ = actor.rollout_to_tq(batch_of(["1+2="]), partition_id="train")
    assert carry["total_reward"].tolist() == [1.0]


def test_an_asynchronous_engine_is_used_row_by_row(actor_of):
    generator = AsyncAdder()
    actor = actor_of(generator, policy={"generation": {"backend": "x", "async_engine": True}})
    _, carry, *_ = actor.rollout_to_tq(batch_of(["1+2=", "3+4="]), partition_id="train")
    assert carry["total_reward"].tolist() == [1.0, 1.0]
    assert [len(call["prompts"]) for call in generator.seen] == [1, 1]


def test_nemo_gym_is_refused_at_construction(store):
    master = config(env={"should_use_nemo_gym": True})
    with pytest.raises(UnsupportedError, match="should_use_nemo_gym"):
        SyncRolloutActor(Adder(), CharTokenizer(), {}, master, DP_CFG)


def test_without_a_store_there_is_nothing_to_attach_to():
    InMemoryDataPlaneClient(DP_CFG).close()
    with pytest.raises(ConfigError, match="no open store"):
        SyncRolloutActor(Adder(), CharTokenizer(), {}, config(), DP_CFG)


def test_shutdown_detaches_twice_and_leaves_the_store_open(actor_of, store):
    actor = actor_of()
    meta, *_ = actor.rollout_to_tq(batch_of(["1+2="]), partition_id="train")
    actor.shutdown()
    actor.shutdown()
    with pytest.raises(ClosedError, match="shut down"):
        actor.rollout_to_tq(batch_of(["1+2="]), partition_id="train")
    assert read_columns(store, meta, ["input_ids"]).size == 1


def test_configured_step_timeout_names_the_task(store):
    env = SimpleNamespace(step=Method(lambda logs, infos: Future()))
    actor = SyncRolloutActor(
        Adder(), CharTokenizer(), {"sum": env}, config(env={"step_timeout_s": 0.05}), DP_CFG
    )
    with pytest.raises(TimeoutError, match=r"task 'sum'.*0\.05 s"):
        actor.rollout_to_tq(batch_of(["1+2="]), partition_id="train")
    actor.shutdown()


def test_client_with_only_the_documented_methods_suffices(actor_of, store, monkeypatch):
    attached = MinimalClient(InMemoryDataPlaneClient(bootstrap=False))
    monkeypatch.setattr(
        "rollout_actor.actor.build_data_plane_client", lambda cfg, bootstrap: attached
    )
    meta, carry, _, _ = actor_of().rollout_to_tq(batch_of(["1+1=", "2+3="]), partition_id="train")
    assert list(carry["total_reward"].shape) == [2]
    read = read_columns(attached, meta, ["input_ids", "sample_mask"])
    assert read["sample_mask"].tolist() == [1.0, 1.0]
