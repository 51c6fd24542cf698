"""What must hold for every loss: gradients, splits, order, masks."""

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

from .policy_cases import AGGREGATION
from .policy_cases import LOSSES as POLICY_LOSSES

ROWS, TOKENS, VOCABULARY = 6, 5, 7
PAIRS = {name: {"loss_type": name} for name in sorted(PAIR_LOSSES)}
PAIRS |= {name: PAIRS[name] | {"label_smoothing": 0.1} for name in ("exo_pair", "robust")}
BY_BATCH = {"dpo aot", "dpo aot_unpaired", "policy bnpo", "policy clip_cov", "policy kl_cov"}
"""They sort the batch or count it, so that its parts are other losses."""
DETACHED = {"dft_loss", "policy cispo", "policy vespo", "policy gspo_token"}
"""A factor is detached, so that numbers cannot find the gradient."""


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
    **{
        f"policy {name}": Case(loss, {}, "tokens" if AGGREGATION[name] == "token-mean" else "sequences")
        for name, loss in POLICY_LOSSES.items()
    },
}
every_loss = pytest.mark.parametrize("name", CASES)
masked_loss = pytest.mark.parametrize("name", sorted(CASES.keys() - {"dpo aot", "dpo aot_unpaired"}))


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
        "old_logprobs": logprobs["logprobs"] + 0.4 * normal(*shape),
        "advantages": normal(*shape),
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


def run(name: str, arguments: dict[str, Tensor], **more: Any) -> tuple[LossOutput, Tensor]:
    """What a loss gives, and the gradient of the first argument, which is trained."""
    key = next(iter(arguments))
    leaf = arguments[key].detach().clone().requires_grad_()
    output = made(name)[0](**arguments | {key: leaf}, **more)
    output.loss.backward()
    return output, leaf.grad


def without_mask(name: str, arguments: dict[str, Tensor]) -> dict[str, Tensor]:
    """All rows count where there is a choice."""
    return {key: value for key, value in arguments.items() if key != "mask" or CASES[name].counts != "rows"}


@every_loss
def test_gradcheck_and_detached_metrics(name: str) -> None:
    loss, arguments = made(name)
    arguments = without_mask(name, arguments)
    key = next(iter(arguments))
    if not DETACHED & {name, name.split()[0]}:
        leaf = arguments[key].detach().clone().requires_grad_()
        assert torch.autograd.gradcheck(lambda value: loss(**arguments | {key: value}).loss, (leaf,))
    given = {other: value.requires_grad_(value.is_floating_point()) for other, value in arguments.items()}
    output = loss(**given)
    assert output.loss.dtype == torch.float64
    assert all(value.shape == () and not value.requires_grad for value in output.metrics.values())
    output.loss.backward()
    of_targets = ("ref_", "teacher", "old_", "returns", "advantages")
    assert [name for name, value in given.items() if name.startswith(of_targets) and value.grad is not None] == []


@pytest.mark.parametrize(
    ("name", "parts"), [(name, parts) for name in CASES for parts in ((1,) if name in BY_BATCH else (2, 4))]
)
def test_gradient_does_not_depend_on_order_padding_and_micro_batches(name: str, parts: int) -> None:
    arguments = without_mask(name, made(name)[1])
    counts, knobs = CASES[name].counts, dict[str, Any]()
    _, whole = run(name, arguments)
    if parts > 1:
        knobs["denominator"] = arguments["mask"].sum() if counts == "tokens" else ROWS
        if "mean_chosen_length" in inspect.signature(CASES[name].loss).parameters:
            knobs["mean_chosen_length"] = arguments["chosen_lengths"].double().mean()
    if counts != "rows":  # tokens of nothing on both sides
        arguments, whole = {other: padded(value) for other, value in arguments.items()}, padded(whole, 0.0)
    split = torch.zeros_like(whole)
    for rows in torch.randperm(ROWS, generator=torch.Generator().manual_seed(parts)).tensor_split(parts):
        split[rows] = run(name, {other: value[rows] for other, value in arguments.items()}, **knobs)[1]
    torch.testing.assert_close(split, whole)


def padded(values: Tensor, fill: float = torch.nan) -> Tensor:
    """(B, T, ...) with a token more in front and two behind."""
    fill = fill if values.is_floating_point() else 0
    more = values.new_full((len(values), 2, *values.shape[2:]), fill)
    return torch.cat([more[:, :1], values, more], 1)


@masked_loss
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_what_is_masked_reaches_neither_loss_nor_gradient_nor_metrics(name: str, poison: float) -> None:
    _, arguments = made(name)
    mask, by_row = arguments["mask"], CASES[name].counts == "rows"
    left = {key: value[mask] for key, value in without_mask(name, arguments).items()} if by_row else arguments
    expected, gradient = run(name, left)
    poisoned = {
        key: value.where(mask.view(*mask.shape, *[1] * (value.dim() - mask.dim())), torch.tensor(poison))
        if value.is_floating_point()
        else value
        for key, value in arguments.items()
    }
    with torch.autograd.set_detect_anomaly(True):  # no NaN on the way either
        output, found = run(name, poisoned)
    torch.testing.assert_close(output.loss, expected.loss)
    torch.testing.assert_close(dict(output.metrics), dict(expected.metrics))
    torch.testing.assert_close(dict(output.tokens), dict(expected.tokens))
    torch.testing.assert_close(found[mask], gradient if by_row else gradient[mask])
    assert (found[~mask] == 0).all()


@masked_loss
def test_nothing_selected_gives_a_loss_of_zero_with_a_gradient_of_zero(name: str) -> None:
    _, arguments = made(name)
    output, gradient = run(name, arguments | {"mask": torch.zeros_like(arguments["mask"])})
    assert output.loss.item() == 0.0
    assert (gradient == 0).all()
    assert all(value.isfinite() for value in output.metrics.values())
