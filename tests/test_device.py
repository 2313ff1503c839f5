"""The run on a GPU that this repository's CI cannot have: what `device.tensors_on` does, on the device without memory."""

from __future__ import annotations

import pytest
import torch

import device
from cases import same_bits


def test_what_a_test_makes_is_on_the_device_of_the_run() -> None:
    g = torch.Generator().manual_seed(0)
    with device.tensors_on("meta"):
        made = [
            torch.tensor([1.0]), torch.zeros(2), torch.arange(3), torch.full((2,), 1.0), torch.as_tensor(3), torch.eye(2),
            torch.rand(2, generator=g), torch.randn(2), torch.randint(5, (2,), generator=g), torch.randperm(3),
            torch.empty(2).uniform_(0, 1, generator=g), torch.empty(2).uniform_(0, 1), torch.empty(2).normal_(generator=g),
        ]  # fmt: skip
        leaf = torch.randn(2, requires_grad=True)
        assert {x.device.type for x in made} == {"meta"} and leaf.is_meta and leaf.is_leaf and leaf.requires_grad
        assert torch.randn(2, device="cpu").device.type == "cpu"
        with torch.device("cpu"):
            assert torch.randn(2).device.type == torch.zeros(2).device.type == "cpu"
    assert torch.randn(2).device.type == torch.zeros(2).device.type == "cpu"


@pytest.mark.parametrize(
    "draw",
    [
        lambda g: torch.rand(3, 2, generator=g),
        lambda g: torch.randn(3, generator=g, dtype=torch.float64),
        lambda g: torch.randint(9, (4,), generator=g),
        lambda g: torch.randperm(9, generator=g),
        lambda g: torch.empty(5).uniform_(-1, 2, generator=g),
        lambda g: torch.randn(4),
    ],
)
def test_random_numbers_are_those_of_the_cpu(draw) -> None:
    def numbers() -> torch.Tensor:
        torch.manual_seed(1)
        return draw(torch.Generator().manual_seed(2))

    plain = numbers()
    with device.tensors_on("cpu:0"):
        assert same_bits(numbers(), plain)


def test_backends_of_the_cpu_run_there() -> None:
    assert device.device_of(["torch", "cpu", "no such backend"]) == "cpu"
