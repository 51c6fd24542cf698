"""The functions of tiles, compiled as for CUDA and run on the CPU, beside the same functions run as they are."""

import logging
import os
import subprocess
import sys

import pytest
import torch

from rlhfkit.losses.fused_head import tiles

from .test_logprobs import KNOBS, fused, random_head

pytestmark = pytest.mark.long


@pytest.fixture
def compiling(monkeypatch):
    """Lets the CPU take the path of CUDA; traced and functionalised, but run by eager kernels."""
    monkeypatch.setattr(tiles, "_failed", False)
    monkeypatch.setattr(tiles, "_has_kernels", lambda device: True)
    monkeypatch.setattr(tiles, "_BACKEND", "aot_eager")


def head_results(head, dtype, entropy, knobs):
    head = head.to(dtype)
    results = [part for part in fused(head, entropy=entropy, chunk=10, **knobs) if part is not None]
    return [*results, *torch.autograd.grad(sum(part.square().sum() for part in results), head.leaves)]


@pytest.mark.parametrize(
    ("dtype", "entropy", "knobs"),
    [(torch.float64, False, KNOBS[0]), (torch.float64, True, KNOBS[-1]), (torch.bfloat16, False, KNOBS[1])],
    ids=str,
)
def test_compiled_tiles_equal_those_that_run_as_they_are(request, dtype, entropy, knobs):
    head = random_head(7, width=8, vocabulary=23)
    assert not tiles.can_compile("cpu")
    expected = head_results(head, dtype, entropy, knobs)
    request.getfixturevalue("compiling")
    # One rounding of a bfloat16 tile may fall the other way.
    tolerance = 1e-10 if dtype == torch.float64 else 2**-6
    for mine, reference in zip(head_results(head, dtype, entropy, knobs), expected, strict=True):
        difference = (mine.double() - reference.double()).norm()
        assert difference <= tolerance * reference.double().norm()


def test_without_a_compiler_training_goes_on_and_one_line_says_why(tmp_path):
    """The real compiler of ``torch.compile`` for the CPU, which needs a C++ compiler, in a process of its own."""
    program = """
import logging
import torch
from rlhfkit.losses import linear_logprobs
from rlhfkit.losses.fused_head import tiles

def results(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn((rows, 8), generator=generator, dtype=dtype, requires_grad=True) for rows in (7, 23))
    output = linear_logprobs(hidden, weight, torch.arange(7), entropy=True, chunk=10)
    total = output.logprobs.sum() + output.entropy.sum()
    return [output.logprobs, output.entropy, *torch.autograd.grad(total, (hidden, weight))]

logging.basicConfig(format="%(levelname)s %(message)s")
expected, tried = results(), []
compile = torch.compile
torch.compile = lambda *args, **kwargs: tried.append(args) or compile(*args, **kwargs)
tiles._has_kernels = lambda device: True
for _ in range(2):
    for mine, other in zip(results(), expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10)
    assert len(tried) == 1, tried
    assert not tiles.can_compile("cpu")
"""
    environment = os.environ | {"CC": "/no/compiler", "CXX": "/no/compiler", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    (line,) = [line for line in run.stderr.splitlines() if line.startswith("WARNING")]
    assert line.startswith("WARNING log-probs of the output layer run without compiled kernels, which is slower: ")
    assert "/no/compiler" in line


@pytest.mark.parametrize("switch", ["TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"])
def test_pytorch_s_own_switch_leaves_compilation_out(monkeypatch, compiling, switch):
    assert tiles.can_compile("cpu")
    monkeypatch.setenv(switch, "1")
    assert not tiles.can_compile("cpu")


def test_an_error_of_the_arguments_is_raised_and_no_reason_to_stop_compiling(compiling):
    def divide(left, right):
        return left // right

    with pytest.raises(ZeroDivisionError):
        tiles.run_compiled(divide, 1, 0)
    assert tiles.can_compile("cpu")


def test_a_gpu_without_triton_is_told_once(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(tiles.importlib.util, "find_spec", lambda name: None)
    tiles._has_kernels.cache_clear()
    with caplog.at_level(logging.WARNING, logger="rlhfkit"):
        assert [tiles.can_compile("cuda") for _ in range(2)] == [False, False]
    assert caplog.messages == [f"{tiles._SLOWER}: Triton is not installed"]
    tiles._has_kernels.cache_clear()
