"""Distillation from another vocabulary: the loss over texts with plain Python numbers, and its limits."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from losses.hybrid_reference import compare, outcomes
from losses.whole_graph import WHOLE_GRAPH
from rlhfkit.losses import distillation_loss, hybrid_distillation_loss, universal_logit_distance
from rlhfkit.losses.hybrid_distillation import hybrid_divergence

STUDENT = ["a", "b", "ab", "c", "x", "bc"]
TEACHER = ["c", "a", "b", "abc", "y"]
COMMON = torch.tensor([(STUDENT.index(text), TEACHER.index(text)) for text in STUDENT if text in TEACHER])
SPANS = [
    (["a"], ["a"]),
    (["ab"], ["a", "b"]),
    (["ab", "c"], ["abc"]),
    (["a", "bc"], ["abc"]),
    (["a", "b", "c"], ["abc"]),
    (["bc"], ["b", "c"]),
]
"""A span in the tokens of student and teacher."""
DIVERGENCES = ["forward_kl", "reverse_kl", "jsd"]


def batch(seed: int = 0) -> dict[str, Tensor]:
    """One row with all the spans, and random logits of both."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return 2 * torch.randn(1, len(SPANS), *shape, generator=generator, dtype=torch.float64)

    def later(side: int) -> Tensor:
        return torch.tensor([[-0.3 * (len(span[side]) - 1) for span in SPANS]], dtype=torch.float64)

    return {
        "student": normal(len(STUDENT)),
        "teacher": normal(len(TEACHER)),
        "mask": torch.ones(1, len(SPANS), dtype=torch.bool),
        "common": COMMON,
        "tokens": torch.tensor([[STUDENT.index(span[0][0]) for span in SPANS]]),
        "teacher_tokens": torch.tensor([[TEACHER.index(span[1][0]) for span in SPANS]]),
        "later": later(0),
        "teacher_later": later(1),
    }


def by_hand(given: dict[str, Tensor], number: int, divergence: str, weight: float) -> tuple[float, float]:
    """The divergence of what both have, and the distance of what they do not, at one span."""
    ours, theirs = SPANS[number]
    p, q = (
        outcomes(
            dict(zip(texts, given[side][0, number].softmax(-1).tolist(), strict=True)),
            span,
            given[later][0, number].item(),
            other_is_one=len(other) == 1,
        )
        for side, later, texts, span, other in (
            ("student", "later", STUDENT, ours, theirs),
            ("teacher", "teacher_later", TEACHER, theirs, ours),
        )
    )
    assert math.isclose(sum(p.values()), 1.0)

    return compare(p, q, divergence, weight)


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("seed", range(3))
def test_the_loss_is_that_of_texts_by_hand(divergence: str, seed: int) -> None:
    given = batch(seed)
    expected = [by_hand(given, number, divergence, 0.3) for number in range(len(SPANS))]
    knobs = {"divergence": divergence, "teacher_weight": 0.3}
    matched, unmatched = hybrid_divergence(**given, **knobs)
    # A token that is the whole span has no other text to begin, and a log-prob of -1e4 stands for log 0.
    assert matched[0].tolist() == pytest.approx([first for first, _ in expected], rel=1e-9)
    assert unmatched[0].tolist() == pytest.approx([second for _, second in expected], rel=1e-9)
    assert (matched >= 0).all()
    output = hybrid_distillation_loss(**given, **knobs, unmatched_weight=0.5)
    sums = sum(first + 0.5 * second for first, second in expected)
    assert output.loss.item() == pytest.approx(sums / len(SPANS), rel=1e-9)
    assert output.metrics["distillation/unmatched"].item() == pytest.approx(unmatched.mean().item())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_with_one_vocabulary_in_any_order_it_is_the_ordinary_divergence(
    divergence: str, dtype: torch.dtype, tolerance: float
) -> None:
    generator = torch.Generator().manual_seed(1)
    student, teacher = torch.randn(2, 3, 4, 9, generator=generator, dtype=torch.float64).to(dtype)
    mask, tokens = torch.rand(3, 4, generator=generator) < 0.7, torch.randint(9, (3, 4), generator=generator)
    order = torch.randperm(9, generator=generator)
    common = torch.stack([order, torch.arange(9)], -1)
    knobs = {"divergence": divergence, "temperature": 1.5, "teacher_weight": 0.3}
    expected = distillation_loss(student.requires_grad_(), teacher, mask, **knobs).loss
    found = hybrid_distillation_loss(
        student,
        teacher[..., order],
        mask,
        common=common,
        tokens=tokens,
        teacher_tokens=order.argsort()[tokens],
        **knobs,
    )
    torch.testing.assert_close(found.loss, expected, rtol=0, atol=tolerance)
    assert found.metrics["distillation/unmatched"] == 0
    gradients = [torch.autograd.grad(loss, student)[0] for loss in (found.loss, expected)]
    torch.testing.assert_close(*gradients, rtol=0, atol=tolerance)


def test_without_common_tokens_the_sorted_distance_and_the_span_are_left() -> None:
    given = batch() | {"common": torch.zeros(0, 2, dtype=torch.int64)}
    matched, _ = hybrid_divergence(**given)
    p, q = given["student"][0, 0].softmax(-1)[0].item(), given["teacher"][0, 0].softmax(-1)[1].item()
    assert matched[0, 0].item() == pytest.approx(q * math.log(q / p) - q + p)


def test_the_sorted_distance_is_that_of_lists() -> None:
    first, second = torch.tensor([[0.5, 0.2, 0.3]]), torch.tensor([[0.1, 0.6, 0.1, 0.2]])
    assert universal_logit_distance(first.log(), second.log()).item() == pytest.approx(0.1 + 0.1 + 0.1 + 0.1)
    assert universal_logit_distance(second.log(), first.log()).item() == pytest.approx(0.4)
    assert universal_logit_distance(first.log(), first.log()[:, [2, 0, 1]]).item() == 0
    # Nothing in common: the first list is one token of probability 1, the second many of none.
    certain, even = torch.tensor([0.0, -1e4]), torch.full((1000,), -math.log(1000))
    assert universal_logit_distance(certain, even).item() == pytest.approx(2 - 2 / 1000, rel=1e-5)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_gradcheck_of_logits_and_of_later_tokens(divergence: str) -> None:
    given = batch(4)
    several = given["later"] < 0

    def loss(student: Tensor, later: Tensor) -> Tensor:
        knobs = {"student": student, "later": later.where(several, 0.0)}
        return hybrid_distillation_loss(**given | knobs, divergence=divergence).loss

    assert torch.autograd.gradcheck(loss, (given["student"].requires_grad_(), given["later"].requires_grad_()))


def test_masked_spans_reach_neither_loss_nor_gradient_and_the_teacher_has_none() -> None:
    given = batch()
    given["mask"][0, ::2] = False
    expected = hybrid_distillation_loss(**given)
    keep = given["mask"]
    poisoned = {name: given[name].where(keep, math.nan).requires_grad_() for name in ("later", "teacher_later")}
    for name in ("student", "teacher"):
        poisoned[name] = given[name].where(keep[..., None], math.nan).requires_grad_()
    output = hybrid_distillation_loss(**given | poisoned)
    output.loss.backward()
    torch.testing.assert_close(output, expected)
    assert poisoned["student"].grad[~keep].eq(0).all()
    assert poisoned["later"].grad[~keep].eq(0).all()
    assert poisoned["teacher"].grad is None
    assert poisoned["teacher_later"].grad is None


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_tokens_that_cannot_be_and_certain_ones_stay_finite(divergence: str) -> None:
    given = batch()
    for side in ("student", "teacher"):
        banned = given[side].clone()
        banned[..., 1:3] = -math.inf
        certain = given[side].clone()
        certain[..., 0] = 1e3
        for logits in (banned, certain):
            for later in (given["later"], given["later"].clamp(min=-1e-12), given["later"] * 1e6):
                student = (logits if side == "student" else given["student"]).clone().requires_grad_()
                knobs = {"student": student, "later": later.clone().requires_grad_()}
                knobs |= {"teacher": logits} if side == "teacher" else {}
                loss = hybrid_distillation_loss(**given | knobs, divergence=divergence).loss
                loss.backward()
                assert loss.isfinite()
                assert student.grad.isfinite().all()
                assert knobs["later"].grad.isfinite().all()


def test_padding_and_micro_batches_do_not_change_the_gradient() -> None:
    given = batch()
    given["student"].requires_grad_()
    expected = torch.autograd.grad(hybrid_distillation_loss(**given).loss, given["student"])[0]
    rows = {name: tensor if name == "common" else tensor.transpose(0, 1) for name, tensor in given.items()}
    total = torch.zeros(())
    for part in (slice(0, 3), slice(3, len(SPANS))):
        padded = {
            name: tensor if name == "common" else pad(tensor[part], (0, 0, 0, 2) if tensor.dim() == 3 else (0, 2))
            for name, tensor in rows.items()
        }
        total = total + hybrid_distillation_loss(**padded, denominator=float(len(SPANS))).loss
    torch.testing.assert_close(torch.autograd.grad(total, given["student"])[0], expected)


@WHOLE_GRAPH
def test_compiles_without_graph_breaks() -> None:
    compiled = torch.compile(hybrid_distillation_loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**batch()).loss, hybrid_distillation_loss(**batch()).loss)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"divergence": "kl"}, "divergence must be"),
        ({"teacher_weight": 0.0}, "teacher_weight must lie"),
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"unmatched_weight": -1.0}, "unmatched_weight must be at least 0"),
        ({"common": torch.zeros(3, dtype=torch.int64)}, r"common must be \(C, 2\)"),
        ({"tokens": torch.zeros(2, 2, dtype=torch.int64)}, "same shape"),
        ({"teacher_later": torch.zeros(2, 2)}, "same shape"),
        ({"student": torch.zeros(2, 2, 3)}, r"student and teacher must be \(B, S, V\)"),
    ],
)
def test_nonsense_is_refused(knobs: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hybrid_distillation_loss(**batch() | knobs)


def test_distributions_over_other_places_are_refused() -> None:
    with pytest.raises(ValueError, match=r"must be \(..., V\) and \(..., W\)"):
        universal_logit_distance(torch.zeros(2, 3), torch.zeros(3, 3))
