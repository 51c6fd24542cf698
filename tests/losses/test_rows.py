"""What must hold for every loss but policy losses (``policy/test_properties.py``): gradients, splits, order, masks."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from rlhfkit import losses
from rlhfkit.losses import LossOutput
from rlhfkit.losses.preference.dpo import PAIR_LOSSES

ROWS, TOKENS, VOCABULARY = 6, 5, 7
PAIRS = {name: {"loss_type": name} for name in sorted(PAIR_LOSSES)}
PAIRS |= {name: PAIRS[name] | {"label_smoothing": 0.1} for name in ("exo_pair", "robust")}
SORTED = {"dpo aot", "dpo aot_unpaired"}
"""They sort the batch, so that its parts are other losses; see ``preference/test_dpo.py``."""


class Case(NamedTuple):
    """A loss with knobs, whose arguments of one value for each row or token are made by name."""

    loss: Callable[..., LossOutput]
    knobs: dict[str, Any] = {}
    counts: str = "tokens"


CASES: dict[str, Case] = {
    **{f"dpo {name}": Case(losses.dpo_loss, knobs, "rows") for name, knobs in PAIRS.items()},
    "dpo with likelihood": Case(losses.dpo_loss, {"nll_coef": 0.3, "divergence": "js"}, "rows"),
    "simpo": Case(losses.simpo_loss, {}, "rows"),
    "alphapo": Case(losses.simpo_loss, {"alpha": 0.25}, "rows"),
    "cpo-simpo": Case(losses.simpo_loss, {"nll_coef": 0.7}, "rows"),
    **{f"cpo {name}": Case(losses.cpo_loss, {"loss_type": name}, "rows") for name in ("sigmoid", "hinge", "ipo")},
    "orpo": Case(losses.orpo_loss, {}, "rows"),
    "kto": Case(losses.kto_loss, {"kl": 0.4, "undesirable_weight": 1.3, "beta": 0.3}, "rows"),
    "apo_zero_unpaired": Case(losses.kto_loss, {"kl": None, "loss_type": "apo_zero_unpaired"}, "rows"),
    "bco": Case(losses.bco_loss, {"shift": 0.3, "desirable_weight": 1.5}, "rows"),
    "reward": Case(losses.bradley_terry_loss, {"centering": 0.05, "label_smoothing": 0.1}, "rows"),
    "process, two classes": Case(losses.process_reward_loss, {"classes": 2}),
    "process, soft": Case(losses.process_reward_loss, {"classes": 2, "soft": True}),
    "process, five classes": Case(losses.process_reward_loss, {"classes": 5}),
    "process, one logit": Case(losses.process_reward_loss, {"soft": True}),
    **{
        f"{loss.__name__} {mode}": Case(loss, {"aggregation": mode}, "tokens" if mode == "token-mean" else "sequences")
        for loss in (losses.cross_entropy_loss, losses.dft_loss)
        for mode in ("token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum")
    },
    "value": Case(losses.value_loss),
    **{f"kl {name}": Case(losses.kl_loss, {"estimator": name, "clamp": 10.0}) for name in ("k1", "k2", "k3")},
    **{
        f"{divergence} {form}": Case(losses.distillation_loss, {"divergence": divergence, **form})
        for divergence in ("forward_kl", "reverse_kl", "jsd")
        for form in ({}, {"top_k": 3}, {"top_k": 3, "remainder": "renormalize"}, {"temperature": 2.0})
    },
}
every_loss = pytest.mark.parametrize("name", CASES)
whole_by_parts = pytest.mark.parametrize("name", sorted(CASES.keys() - SORTED))


def made(name: str) -> tuple[Callable[..., LossOutput], dict[str, Tensor]]:
    """The loss, which takes what differs between rows, and these arguments in float64; the first is trained."""
    case, generator = CASES[name], torch.Generator().manual_seed(7)
    knobs = dict(case.knobs)
    classes, soft = knobs.pop("classes", None), knobs.pop("soft", False)
    by_row = case.counts == "rows"

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    mask = torch.rand(ROWS, TOKENS, generator=generator) < 0.6
    mask[:, 0] = True
    shape = (ROWS,) if by_row else (ROWS, TOKENS)
    logprobs = {key: -0.1 - 3 * normal(*shape).abs() for key in ("chosen", "rejected", "logprobs")}
    logprobs |= {key: -3 * normal(*shape).abs() for key in ("ref_chosen", "ref_rejected", "ref_logprobs")}
    known: dict[str, Tensor] = {
        **logprobs,
        **{key: normal(*shape) for key in ("values", "old_values", "returns")},
        **{key: torch.randint(1, 9, shape, generator=generator) for key in ("chosen_lengths", "rejected_lengths")},
        "student": normal(ROWS, TOKENS, VOCABULARY),
        "teacher": normal(ROWS, TOKENS, VOCABULARY),
        "desirable": torch.tensor([True, False, True, True, False, True]),
        "logits": normal(*shape, *([classes] if classes else [])),
        "labels": torch.rand(shape, generator=generator).double()
        if soft
        else torch.randint(classes or 2, shape, generator=generator),
        "mask": torch.tensor([1, 1, 0, 1, 0, 1]).bool() if by_row else mask,
    }
    names = [key for key in inspect.signature(case.loss).parameters if key in known]
    return functools.partial(case.loss, **knobs), {key: known[key] for key in names}


def trained(arguments: dict[str, Tensor]) -> tuple[str, Tensor]:
    """The argument that is trained, and a copy of it that collects a gradient."""
    name = next(iter(arguments))
    return name, arguments[name].detach().clone().requires_grad_()


def without_mask(name: str, arguments: dict[str, Tensor]) -> dict[str, Tensor]:
    """All rows count where there is a choice."""
    return {key: value for key, value in arguments.items() if key != "mask" or CASES[name].counts != "rows"}


@every_loss
def test_gradcheck_and_detached_metrics(name: str) -> None:
    loss, arguments = made(name)
    arguments = without_mask(name, arguments)
    key, leaf = trained(arguments)
    if CASES[name].loss is not losses.dft_loss:  # whose factor is detached, so that numbers cannot find the gradient
        assert torch.autograd.gradcheck(lambda value: loss(**arguments | {key: value}).loss, (leaf,))
    given = {other: value.requires_grad_(value.is_floating_point()) for other, value in arguments.items()}
    output = loss(**given)
    assert output.loss.dtype == torch.float64
    assert all(value.shape == () and not value.requires_grad for value in output.metrics.values())
    output.loss.backward()
    of_targets = ("ref_", "teacher", "old_", "returns")
    assert [name for name, value in given.items() if name.startswith(of_targets) and value.grad is not None] == []


@whole_by_parts
@pytest.mark.parametrize("parts", [2, 4])
def test_gradient_does_not_depend_on_order_padding_and_micro_batches(name: str, parts: int) -> None:
    loss, arguments = made(name)
    arguments = without_mask(name, arguments)
    key, whole = trained(arguments)
    loss(**arguments | {key: whole}).loss.backward()
    counts = CASES[name].counts
    knobs: dict[str, Any] = {"denominator": arguments["mask"].sum() if counts == "tokens" else ROWS}
    if "mean_chosen_length" in inspect.signature(CASES[name].loss).parameters:
        knobs["mean_chosen_length"] = arguments["chosen_lengths"].double().mean()
    if counts != "rows":  # two tokens more, of nothing
        arguments = {other: padded(value) for other, value in arguments.items()}
    key, split = trained(arguments)
    for rows in torch.randperm(ROWS, generator=torch.Generator().manual_seed(parts)).tensor_split(parts):
        own = {other: value[rows] for other, value in arguments.items()} | {key: split[rows]}
        loss(**own, **knobs).loss.backward()
    torch.testing.assert_close(split.grad, whole.grad if counts == "rows" else padded(whole.grad, 0.0))


def padded(values: Tensor | None, fill: float = torch.nan) -> Tensor:
    """(B, T, ...) with two tokens more."""
    fill = fill if values.is_floating_point() else 0
    return torch.cat([values, values.new_full((len(values), 2, *values.shape[2:]), fill)], 1)


@whole_by_parts
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_what_is_masked_reaches_neither_loss_nor_gradient_nor_metrics(name: str, poison: float) -> None:
    loss, arguments = made(name)
    mask, by_row = arguments["mask"], CASES[name].counts == "rows"
    expected = loss(
        **{key: value[mask] for key, value in without_mask(name, arguments).items()} if by_row else arguments
    )
    poisoned = {
        key: value.where(mask.view(*mask.shape, *[1] * (value.dim() - mask.dim())), torch.tensor(poison))
        if value.is_floating_point()
        else value
        for key, value in arguments.items()
    }
    key, leaf = trained(poisoned)
    output = loss(**poisoned | {key: leaf})
    with torch.autograd.set_detect_anomaly(True):  # no NaN on the way either
        output.loss.backward()
    torch.testing.assert_close(output.loss, expected.loss)
    torch.testing.assert_close(dict(output.metrics), dict(expected.metrics))
    assert leaf.grad.isfinite().all()
    assert (leaf.grad[~mask] == 0).all()


@whole_by_parts
def test_nothing_selected_gives_a_loss_of_zero_with_a_gradient_of_zero(name: str) -> None:
    loss, arguments = made(name)
    key, leaf = trained(arguments)
    output = loss(**arguments | {key: leaf, "mask": torch.zeros_like(arguments["mask"])})
    output.loss.backward()
    assert output.loss.item() == 0.0
    assert (leaf.grad == 0).all()
    assert all(value.isfinite() for value in output.metrics.values())
