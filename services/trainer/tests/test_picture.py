"""The picture of a run is a PNG, whatever the run is called."""

from __future__ import annotations

import matplotlib.image
import pytest

from grpo_trainer.picture import save_reward_picture

HISTORY = [
    {"step": 1, "reward": 0.1},
    {"step": 2, "reward": 0.4, "validation_reward": 0.3},
    {"step": 3, "reward": 0.9},
]


@pytest.mark.parametrize("history", [[], HISTORY[:1], HISTORY], ids=["none", "one", "three"])
def test_the_picture_is_a_png_that_decodes(tmp_path, history):
    path = tmp_path / "reward.png"
    save_reward_picture(history, path, title="GRPO")
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    pixels = matplotlib.image.imread(path)
    assert pixels.shape[:2] == (630, 1200)
    assert pixels[..., :3].min() < 0.5  # something is drawn


def test_more_steps_draw_another_picture(tmp_path):
    for name, count in (("two", 2), ("three", 3)):
        save_reward_picture(HISTORY[:count], tmp_path / name, title="GRPO")
    assert (tmp_path / "two").read_bytes() != (tmp_path / "three").read_bytes()


@pytest.mark.parametrize("low", [0.0, -2.0])
@pytest.mark.parametrize("high", [1.0, 10.0])
def test_a_reward_outside_of_0_to_1_is_in_the_picture(tmp_path, low, high):
    """Orange pixels, the held-out prompts', are in it for the lowest and the highest."""
    history = [{"step": 1, "reward": 0.5, "validation_reward": low}]
    history += [{"step": 2, "reward": 0.5, "validation_reward": high}]
    save_reward_picture(history, tmp_path / "reward.png", title="GRPO")
    pixels = matplotlib.image.imread(tmp_path / "reward.png")[..., :3]
    orange = abs(pixels - [0xD9 / 255, 0x73 / 255, 0x0D / 255]).max(2) < 0.02
    plot = orange[:, : pixels.shape[1] * 3 // 4]  # not the legend
    assert orange[: len(orange) // 4].any()
    assert plot[len(plot) // 2 :].any()


def test_a_title_is_not_read_as_a_formula(tmp_path):
    save_reward_picture(HISTORY, tmp_path / "reward.png", title=r"a $\frac{ b$ c")


def test_nothing_is_left_beside_the_picture(tmp_path):
    save_reward_picture(HISTORY, tmp_path / "reward.png", title="GRPO")
    assert [path.name for path in tmp_path.iterdir()] == ["reward.png"]
