"""Log-probs and entropy of the fused head against dense logits, and its memory. Covers tiles.py."""

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from rlhfkit.losses import linear_logprobs, logits_logprobs
from rlhfkit.losses.fused_head.tiles import RunningSoftmax, tile_statistics

KNOBS = [
    {},
    {"temperature": 0.7},
    {"logit_scale": 1.3, "temperature": 1.7},
    {"logit_softcap": 2.0},
    {"logit_softcap": 1.5, "logit_scale": 0.8, "temperature": 0.6},
]


class Head(NamedTuple):
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor

    def to(self, dtype: torch.dtype) -> "Head":
        """Leaves of their own in another dtype."""
        return Head(*(tensor.detach().to(dtype).requires_grad_() for tensor in self[:3]), self.targets)

    @property
    def leaves(self) -> list[Tensor]:
        return [tensor for tensor in self[:3] if tensor is not None]


def random_head(*leading: int, width: int = 5, vocabulary: int = 11, dtype: torch.dtype = torch.float64) -> Head:
    """Hidden states (..., H) with random weight (V, H), bias (V,) and targets (...)."""
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(vocabulary, leading, generator=generator)
    shapes = (*leading, width), (vocabulary, width), (vocabulary,)
    return Head(*(torch.randn(*shape, generator=generator).double() for shape in shapes), targets).to(dtype)


def fused(head: Head, **knobs):
    return linear_logprobs(head.hidden, head.weight, head.targets, bias=head.bias, **knobs)


def dense(head: Head, *, temperature: float = 1.0, logit_softcap: float | None = None, logit_scale: float = 1.0):
    """Log-probs and entropy by way of all logits, with nothing but torch's own functions."""
    logits = torch.nn.functional.linear(head.hidden, head.weight, head.bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * logit_scale
    if logit_softcap is not None:
        logits = logit_softcap * torch.tanh(logits / logit_softcap)
    distribution = torch.distributions.Categorical(logits=logits / temperature, validate_args=False)
    return distribution.log_prob(head.targets), distribution.entropy()


class LargestTensor(TorchDispatchMode):
    """Number of elements of the largest tensor that any operation gives back."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_iter(result):
            if isinstance(leaf, torch.Tensor):
                self.largest = max(self.largest, leaf.untyped_storage().nbytes() // leaf.element_size())
        return result


def gradients_of(values, leaves):
    return torch.autograd.grad(values.square().sum(), leaves, retain_graph=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("knobs", KNOBS, ids=str)
def test_values_and_gradients_equal_the_dense_head(knobs, with_bias, entropy, dtype):
    head = random_head(2, 4, vocabulary=50, dtype=dtype)
    head = head if with_bias else head._replace(bias=None)
    ours = fused(head, entropy=entropy, chunk=16, **knobs)
    for mine, theirs in zip(ours[: 1 + entropy], dense(head, **knobs)[: 1 + entropy], strict=True):
        torch.testing.assert_close(mine, theirs)
        torch.testing.assert_close(gradients_of(mine, head.leaves), gradients_of(theirs, head.leaves))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_are_as_exact_as_the_dense_head(dtype):
    head = random_head(64, width=32, vocabulary=300, dtype=dtype)

    def results(function, head, **knobs):
        logprobs, entropy = function(head, temperature=3.0, **knobs)
        return [logprobs, entropy, *torch.autograd.grad(logprobs.mean() + entropy.mean(), head.leaves)]

    exact, rough = results(dense, head.to(torch.float64)), results(dense, head)
    ours = results(fused, head, entropy=True, chunk=64)
    assert [tensor.dtype for tensor in ours] == [torch.float32] * 2 + [dtype] * 3
    for mine, theirs, truth in zip(ours, rough, exact, strict=True):
        allowed = 1.5 * (theirs.double() - truth).norm() + 1e-7 * truth.norm()  # different order of summation
        assert (mine.double() - truth).norm() <= allowed


def test_gradient_of_a_sure_token_keeps_its_relative_precision_in_bfloat16():
    # p = 0.998: rounding p to bfloat16 before 1 - p is formed would be wrong by as much as 1 - p itself.
    weight = torch.tensor([[1.0], [0.0]], dtype=torch.bfloat16)
    hidden = torch.tensor([[6.25]], dtype=torch.bfloat16, requires_grad=True)
    linear_logprobs(hidden, weight, torch.tensor([0])).logprobs.sum().backward()
    expected = 1.0 / (1.0 + math.exp(6.25))
    assert hidden.grad.item() == pytest.approx(expected, rel=2**-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_more_tokens_than_one_tile_has_rows(dtype):
    head = random_head(4100, width=3, vocabulary=7, dtype=dtype)
    exact = head.to(torch.float64)
    weights = torch.linspace(-1, 1, 4100)
    logprobs = fused(head, chunk=4).logprobs
    gradients = torch.autograd.grad((logprobs * weights).sum(), head.leaves)
    expected, _ = dense(exact)
    references = torch.autograd.grad((expected * weights).sum(), exact.leaves)
    # bfloat16 has 8 bits; each of the three gradients goes through two or three roundings.
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    for mine, reference in zip((logprobs, *gradients), (expected, *references), strict=True):
        assert (mine.double() - reference).norm() <= tolerance * reference.norm()


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_nothing_as_large_as_the_logits_is_ever_allocated(entropy, softcap):
    tokens, vocabulary, width, chunk = 64, 4096, 8, 256
    head = random_head(tokens, width=width, vocabulary=vocabulary, dtype=torch.float32)
    with LargestTensor() as mode:
        output = fused(head, entropy=entropy, chunk=chunk, logit_softcap=softcap)
        loss = output.logprobs.sum() if output.entropy is None else output.logprobs.sum() + output.entropy.sum()
        loss.backward()
    assert head.weight.grad is not None
    assert 0 < mode.largest <= max(vocabulary * width, tokens * chunk)


def test_vocabulary_entries_with_a_bias_of_minus_infinity_do_not_exist():
    head = random_head(6, vocabulary=12)
    # The last tile of four has no finite logit.
    head = head._replace(targets=head.targets % 7, bias=head.bias.detach().where(torch.arange(12) < 7, -torch.inf))
    expected = fused(head._replace(weight=head.weight[:7], bias=head.bias[:7]), entropy=True)
    output = fused(head, entropy=True, chunk=4)
    for mine, theirs in zip(output, expected, strict=True):
        torch.testing.assert_close(mine, theirs)
        torch.testing.assert_close(gradients_of(mine, head.leaves[:2]), gradients_of(theirs, head.leaves[:2]))


def test_large_logits_do_not_overflow():
    hidden = torch.tensor([[1e4], [-1e4]], requires_grad=True)
    weight = torch.tensor([[1.0], [2.0], [-3.0]], requires_grad=True)
    output = linear_logprobs(hidden, weight, torch.tensor([0, 2]), entropy=True, chunk=1)
    torch.testing.assert_close(output.logprobs, torch.tensor([-1e4, 0.0]))
    torch.testing.assert_close(output.entropy, torch.zeros(2))
    (output.logprobs.sum() + output.entropy.sum()).backward()
    torch.testing.assert_close(hidden.grad, torch.tensor([[-1.0], [0.0]]))


def test_autocast_computes_the_products_as_linear_does():
    head = random_head(16, width=8, vocabulary=40, dtype=torch.float32)
    narrow = head.to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        logprobs, expected = fused(head, chunk=16).logprobs, dense(head)[0]
    gradients, plain = torch.autograd.grad(logprobs.sum(), head.leaves), fused(narrow, chunk=16).logprobs
    assert logprobs.dtype == torch.float32
    assert torch.equal(logprobs, plain)
    torch.testing.assert_close(logprobs, expected)
    assert [gradient.dtype for gradient in gradients] == [torch.float32] * 3
    for gradient, rounded in zip(gradients, torch.autograd.grad(plain.sum(), narrow.leaves), strict=True):
        torch.testing.assert_close(gradient.bfloat16(), rounded, rtol=2**-7, atol=1e-3)  # once more


def test_a_float32_head_on_bfloat16_hidden_states_is_computed_in_float32():
    head = random_head(8, dtype=torch.float32)
    hidden = head.hidden.detach().bfloat16().requires_grad_()
    output = linear_logprobs(hidden, head.weight, head.targets)
    expected = linear_logprobs(hidden.float(), head.weight, head.targets)
    assert torch.equal(output.logprobs, expected.logprobs)
    with torch.no_grad():
        assert not linear_logprobs(hidden, head.weight, head.targets).logprobs.requires_grad
    gradient = torch.autograd.grad(output.logprobs.sum(), (hidden, head.weight))
    assert [tensor.dtype for tensor in gradient] == [torch.bfloat16, torch.float32]


def test_the_weight_may_be_away_between_forward_and_backward():
    # What DeepSpeed ZeRO-3 does to a parameter: its data is released after forward and gathered again for backward.
    head = random_head(4)
    weight = torch.nn.Parameter(head.weight.detach().clone())
    logprobs = linear_logprobs(head.hidden, weight, head.targets, chunk=4).logprobs
    full = weight.data
    weight.data = torch.empty(0, dtype=full.dtype)
    weight.data = full.clone()
    full.fill_(torch.nan)  # nothing may still read the old memory
    logprobs.sum().backward(retain_graph=True)
    expected, _ = dense(head._replace(bias=None))
    torch.testing.assert_close(weight.grad, torch.autograd.grad(expected.sum(), head.weight)[0])
    weight.data = torch.empty(0, dtype=full.dtype)
    with pytest.raises(RuntimeError, match="did not gather it again"):
        logprobs.sum().backward()


def test_backward_saves_the_weight_itself_and_nothing_else_of_its_size():
    head = random_head(4, vocabulary=50)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        fused(head, entropy=True, chunk=20)
    large = [tensor for tensor in saved if tensor.numel() >= head.weight.numel()]
    assert [tensor.data_ptr() for tensor in large] == [head.weight.data_ptr()]


def test_no_tokens_give_no_log_probs_and_a_gradient_of_zero():
    head = random_head(0)
    output = fused(head, entropy=True)
    assert output.logprobs.shape == output.entropy.shape == (0,)
    gradients = torch.autograd.grad(output.logprobs.sum() + output.entropy.sum(), head.leaves)
    assert not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("knobs", [{}, {"temperature": 0.7}], ids=str)
@pytest.mark.parametrize("entropy", [False, True])
def test_logits_that_exist_give_the_same(knobs, entropy):
    logits, targets = random_head(2, 3, width=7)[::3]
    output = logits_logprobs(logits, targets % 7, entropy=entropy, **knobs)
    distribution = torch.distributions.Categorical(logits=logits / knobs.get("temperature", 1.0))
    expected = distribution.log_prob(targets % 7), distribution.entropy()
    for mine, theirs in zip(output[: 1 + entropy], expected[: 1 + entropy], strict=True):
        torch.testing.assert_close(mine, theirs)
        torch.testing.assert_close(gradients_of(mine, logits), gradients_of(theirs, logits))


def test_bfloat16_logits_are_reduced_in_float32_and_left_as_they_are():
    logits = (torch.randn(5, 3000, generator=torch.Generator().manual_seed(0)) * 4).bfloat16().requires_grad_()
    before, targets = logits.detach().clone(), torch.arange(5)
    output = logits_logprobs(logits, targets, entropy=True)
    reference = torch.log_softmax(before.double(), -1)
    torch.testing.assert_close(output.logprobs.double(), reference[targets, targets], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(output.entropy.double(), -(reference.exp() * reference).sum(-1), rtol=1e-5, atol=1e-6)
    output.logprobs.sum().backward()
    assert torch.equal(logits.detach(), before)
    expected = -reference.exp()
    expected[targets, targets] += 1.0
    torch.testing.assert_close(logits.grad.double(), expected, rtol=2**-8, atol=1e-12)


def test_a_target_in_no_tile_gives_nan_where_its_range_is_not_checked():
    state = RunningSoftmax.empty(2, torch.float32, torch.device("cpu"), entropy=False)
    logits = torch.randn(2, 4)
    statistics = state.peak, state.total, state.chosen, state.weighted
    state.update(*tile_statistics(logits, torch.tensor([-100, 3]), *statistics, 1.0, None))
    assert state.chosen[0].isnan()
    torch.testing.assert_close(state.chosen[1], logits[1, 3])
