"""The functions that CUDA compiles, run on the CPU beside the in-place ones that it uses itself."""

import pytest
import torch

from rlhfkit.losses import linear_cross_entropy, linear_logprobs
from rlhfkit.losses.fused_head import compiled, logprobs

from ..head_cases import random_head
from .test_logprobs import KNOBS


@pytest.fixture
def compiling(monkeypatch):
    """Lets the CPU take the path of CUDA; traced and functionalised, but run by eager kernels."""
    monkeypatch.setattr(logprobs, "can_compile", lambda device: True)
    monkeypatch.setattr(compiled, "_BACKEND", "aot_eager")


def head_results(head, dtype, entropy, knobs):
    case = head.to(dtype)
    output = linear_logprobs(case.hidden, case.weight, case.targets, bias=case.bias, entropy=entropy, chunk=10, **knobs)
    loss = output.logprobs.square().sum() if output.entropy is None else (output.logprobs * output.entropy).sum()
    single = linear_cross_entropy(
        case.hidden, case.weight, case.targets, case.targets > 2, bias=case.bias, chunk=3, entropy=entropy, **knobs
    )
    parts = (output.logprobs, output.entropy, single.loss)
    gradients = (*torch.autograd.grad(loss, case.leaves), *torch.autograd.grad(single.loss, case.leaves))
    return [part for part in (*parts, *gradients) if part is not None]


@pytest.mark.parametrize(
    ("dtype", "entropy", "knobs"),
    [(torch.float64, False, KNOBS[0]), (torch.float64, True, KNOBS[-1]), (torch.bfloat16, False, KNOBS[1])],
    ids=str,
)
def test_compiled_tiles_equal_the_in_place_ones(request, dtype, entropy, knobs):
    head = random_head(7, width=8, vocabulary=23)
    expected = head_results(head, dtype, entropy, knobs)
    request.getfixturevalue("compiling")
    # One rounding of a bfloat16 tile may fall the other way.
    tolerance = 1e-10 if dtype == torch.float64 else 2**-6
    for mine, reference in zip(head_results(head, dtype, entropy, knobs), expected, strict=True):
        difference = (mine.double() - reference.double()).norm()
        assert difference <= tolerance * reference.double().norm()


def test_the_cpu_does_not_compile():
    tiles = logprobs.make_tiles((2, 3), torch.float32, torch.device("cpu"), logprobs.LogitTransform(), entropy=False)
    assert type(tiles) is logprobs.Tiles
