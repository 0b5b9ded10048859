"""What can be said of CUDA's memory without a GPU; the rest is not tested here."""

from __future__ import annotations

import pytest
import torch

from refit_mx.cuda_order import beside_others, wait_for, why_not_registered

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ("", False),
        ("expandable_segments:False", False),
        ("max_split_size_mb:128", False),
        ("expandable_segments:True", True),
        ("max_split_size_mb:128, expandable_segments:True", True),
    ],
)
def test_memory_of_expandable_segments_is_refused_by_the_name_of_its_setting(
    name, settings, refused
):
    why = why_not_registered(GPU, {name: settings})
    assert (why is not None) == refused
    if why is not None:
        assert why.startswith(f"{name} has expandable_segments:True")
    assert why_not_registered(torch.device("cpu"), {name: settings}) is None


def test_a_cpu_has_nothing_to_wait_for():
    wait_for([torch.device("cpu")])
    with beside_others(torch.device("cpu")):
        pass
