"""Facts and text of samples are log records whose bodies are JSON."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from dataplane_core.telemetry import step_context
from observability import record_sample_text, record_samples


def recorded(sdk: Any) -> list[tuple[str | None, dict[str, Any], Any]]:
    """Return event name, attributes and decoded body of each record."""
    records = [each.log_record for each in sdk.logs.get_finished_logs()]
    return [
        (record.event_name, dict(record.attributes or {}), json.loads(record.body))
        for record in records
    ]


def test_facts_have_the_step_and_no_nonfinite_numbers(sdk: Any) -> None:
    with step_context("run", 3, weight_version=2):
        record_samples(["a", "b"], {"reward": [0.5, float("nan")], "group": ["g", "g"]})
    [(name, attributes, body)] = recorded(sdk)
    assert name == "rl.sample.facts"
    assert (attributes["rl.run_id"], attributes["rl.step"]) == ("run", 3)
    assert body == {"ids": ["a", "b"], "reward": [0.5, None], "group": ["g", "g"]}


def test_values_that_json_lacks_do_not_fail_the_run(sdk: Any) -> None:
    columns = {
        "reward": np.array([0.5, np.nan], np.float32),
        "truncated": np.array([True, False]),
        "length": torch.tensor([3, 4]),
        "tags": [{"kl": float("nan"), "level": np.int64(2)}, {"set": {1}}],
    }
    record_samples(np.array(["a", "b"]), columns)  # type: ignore[arg-type]
    record_sample_text("a", tokens={"mask": torch.tensor([1.0, float("inf")])})  # type: ignore[dict-item]
    [(_, _, facts), (_, _, text)] = recorded(sdk)
    tags = [{"kl": None, "level": 2}, {"set": None}]
    numbers = {"reward": [0.5, None], "truncated": [True, False], "length": [3, 4]}
    assert facts == {"ids": ["a", "b"], **numbers, "tags": tags}
    assert text["tokens"] == {"mask": [1.0, None]}


def test_many_samples_are_several_records(sdk: Any) -> None:
    ids = [str(number) for number in range(4097)]
    record_samples(ids, {"length": range(4097)})
    bodies = [body for _, _, body in recorded(sdk)]
    assert [len(body["ids"]) for body in bodies] == [4096, 1]
    assert bodies[1] == {"ids": ["4096"], "length": [4096]}


def test_a_column_of_wrong_length_is_refused(sdk: Any) -> None:
    with pytest.raises(ValueError, match=r"column 'reward' has 1 values; expected 2"):
        record_samples(["a", "b"], {"reward": [1.0]})
    assert recorded(sdk) == []


def test_text_and_tokens_are_truncated(sdk: Any) -> None:
    turns = [{"role": "user", "content": "x" * 40_000}]
    record_sample_text("a", turns=turns, tokens={"text": ["t"] * 5000}, run_id="r", step=7)
    [(name, attributes, body)] = recorded(sdk)
    assert (name, attributes["rl.run_id"], attributes["rl.step"]) == ("rl.sample.text", "r", 7)
    assert len(body["turns"][0]["content"]) == 32_768
    assert len(body["tokens"]["text"]) == 4096
    assert body["tokens_omitted"] == 904


def test_nothing_is_recorded_without_an_sdk() -> None:
    record_samples(["a"], {"reward": [1.0]})
    record_sample_text("a")
