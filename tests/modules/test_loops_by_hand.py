"""Every module that learns from data is a loop by hand: plain Transformers, one text at a time, SGD, in float64."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from plain_sgd import sgd_by_hand
from tiny_models import tiny_tokenizer
from torch import Tensor
from torch.nn.functional import binary_cross_entropy, logsigmoid

from rlhfkit import (
    BCOModule,
    CPOModule,
    DFTModule,
    DistillationModule,
    DPOModule,
    KTOModule,
    ORPOModule,
    ProcessRewardModule,
    RewardModule,
    SFTModule,
    SimPOModule,
)
from rlhfkit.data.formats import prompt_tokens
from rlhfkit.data.packing import permutation
from rlhfkit.losses.distillation import JensenShannon
from rlhfkit.losses.preference.unpaired import density_ratio_weights
from rlhfkit.models import ModelLoading

from . import data_runs
from .data_runs import EPOCHS, ROWS, STEP, answer_logprobs, folder_of

folder = folder_of()


@dataclass
class Loop:
    """What a loss by hand looks at."""

    policy: Any
    reference: Any
    teacher: Any
    examples: Any
    embeddings: Tensor
    """Of the policy before training."""
    numbers: list[int] = field(default_factory=list)
    """Of the step's rows."""
    means: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})
    """Rewards of desirable and other answers in the steps so far."""

    def log_ratio(self, answer: Any) -> Tensor:
        """Log-prob of an answer, minus that of the reference."""
        with torch.no_grad():
            anchor = answer_logprobs(self.reference, answer).sum()
        return answer_logprobs(self.policy, answer).sum() - anchor

    def pairs(self, rows: list[Any]) -> list[tuple[Tensor, Tensor]]:
        """Log-probs of the tokens of both answers."""
        return [tuple(answer_logprobs(self.policy, one) for one in (row.chosen, row.rejected)) for row in rows]


# ------------------------------------------------------------------------------------------------------------- texts


def sft(loop: Loop, rows: list[Any]) -> Tensor:
    return -torch.cat([answer_logprobs(loop.policy, row) for row in rows]).mean()


def dft(loop: Loop, rows: list[Any]) -> Tensor:
    logprobs = torch.cat([answer_logprobs(loop.policy, row) for row in rows])
    return -(logprobs * logprobs.exp().detach()).mean()


def distilled(token_loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[Loop, list[Any]], Tensor]:
    """The mean of ``token_loss(student, teacher, targets)``: (n, V) log-probs each and (n,) token ids, to (n,)."""

    def loss(loop: Loop, rows: list[Any]) -> Tensor:
        terms = []
        for row in rows:
            ids, mask = torch.tensor([row.input_ids]), torch.tensor(row.loss_mask[1:])
            both = (model(input_ids=ids).logits[0, :-1][mask].log_softmax(-1) for model in (loop.policy, loop.teacher))
            given, wanted = both
            terms.append(token_loss(given, wanted.detach(), ids[0, 1:][mask]))
        return torch.cat(terms).mean()

    return loss


@distilled
def forward_kl(student: Tensor, teacher: Tensor, _: Tensor) -> Tensor:
    return (teacher.exp() * (teacher - student)).sum(-1)


@distilled
def mixed(student: Tensor, teacher: Tensor, targets: Tensor) -> Tensor:
    """0.3 JSD of weight 0.2 at temperature 2, and 0.7 cross-entropy."""
    p, q = (student / 2).log_softmax(-1).exp(), (teacher / 2).log_softmax(-1).exp()
    m = 0.2 * q + 0.8 * p
    jsd = 0.2 * (q * (q / m).log()).sum(-1) + 0.8 * (p * (p / m).log()).sum(-1)
    return 0.3 * jsd - 0.7 * student.gather(-1, targets[:, None])[:, 0]


@distilled
def bucketed(student: Tensor, teacher: Tensor, _: Tensor) -> Tensor:
    """Reverse KL over the teacher's five likeliest tokens and one category of all others."""
    q, ids = teacher.exp().topk(5, -1)
    p = student.exp().gather(-1, ids)
    p, q = (torch.cat([x, 1 - x.sum(-1, keepdim=True)], -1) for x in (p, q))
    return (p * (p / q).log()).sum(-1)


# ------------------------------------------------------------------------------------------------------- preferences


def dpo(loop: Loop, rows: list[Any]) -> Tensor:
    margins = torch.stack([loop.log_ratio(row.chosen) - loop.log_ratio(row.rejected) for row in rows])
    contrast = 0.9 * logsigmoid(0.3 * margins) + 0.1 * logsigmoid(-0.3 * margins)
    return -contrast.mean() - 0.5 * torch.cat([chosen for chosen, _ in loop.pairs(rows)]).mean()


def simpo(loop: Loop, rows: list[Any]) -> Tensor:
    return -sum(logsigmoid(2.5 * (c.mean() - r.mean()) - 0.5) for c, r in loop.pairs(rows)) / len(rows)


def cpo(loop: Loop, rows: list[Any]) -> Tensor:
    pairs = loop.pairs(rows)
    contrast = sum(logsigmoid(0.1 * (c.sum() - r.sum())) for c, r in pairs) / len(rows)
    return -contrast - torch.cat([chosen for chosen, _ in pairs]).mean()


def log_odds(logprobs: Tensor) -> Tensor:
    return logprobs.mean() - (1 - logprobs.mean().exp()).log()


def orpo(loop: Loop, rows: list[Any]) -> Tensor:
    pairs = loop.pairs(rows)
    contrast = sum(logsigmoid(log_odds(c) - log_odds(r)) for c, r in pairs) / len(rows)
    return -0.2 * contrast - torch.cat([chosen for chosen, _ in pairs]).mean()


def kto(loop: Loop, rows: list[Any]) -> Tensor:
    with torch.no_grad():
        point = torch.stack([loop.log_ratio(row.mismatched) for row in rows]).mean()
    assert point > 1, "with a reference point of 0 the losses would differ"
    terms = []
    for row in rows:
        sign, weight = (1, 1.2) if row.desirable else (-1, 0.7)
        terms.append(weight * (1 - torch.sigmoid(sign * 0.5 * (loop.log_ratio(row.answer) - point))))
    return torch.stack(terms).mean()


def bco(loop: Loop, rows: list[Any], weights: list[float] | None = None) -> Tensor:
    """``weights`` of undesirable answers; the shift is the mean of two averages with decay 0.6."""
    shift, rewards, terms = 0.0, {True: list[float](), False: list[float]()}, []
    for seen in loop.means.values():
        shares = [0.4 * 0.6**age for age in range(len(seen))]
        shift += sum(w * mean for w, mean in zip(shares, reversed(seen), strict=True)) / max(sum(shares), 1e-12) / 2
    for number, row in zip(loop.numbers, rows, strict=True):
        reward = 0.5 * loop.log_ratio(row.answer)
        rewards[row.desirable].append(float(reward.detach()))
        weight = 1.2 if row.desirable else 0.7 if weights is None else weights[number]
        terms.append(-weight * logsigmoid((reward - shift) * (1 if row.desirable else -1)))
    assert abs(shift) > 0.01 or not loop.means[True]
    for wanted, values in rewards.items():
        loop.means[wanted].append(sum(values) / len(values))
    return torch.stack(terms).mean()


def matched_bco(loop: Loop, rows: list[Any]) -> Tensor:
    """Answers are weighted by how likely their prompts, as means of embeddings before training, are among desirable."""
    examples = loop.examples
    means = [loop.embeddings[prompt_tokens(examples.answers[number])].mean(0) for number in range(ROWS)]
    weights = density_ratio_weights(torch.stack(means), torch.tensor(examples.values["desirable"]))
    return bco(loop, rows, weights.tolist())


# ------------------------------------------------------------------------------------------------------------ scores


def reward(loop: Loop, rows: list[Any]) -> Tensor:
    losses = []
    for row in rows:
        chosen, rejected = (
            loop.policy(input_ids=torch.tensor([one.input_ids])).logits[0, 0] for one in (row.chosen, row.rejected)
        )
        gap = chosen - rejected - row.margin
        losses.append(0.05 * (chosen + rejected) ** 2 - 0.9 * logsigmoid(gap) - 0.1 * logsigmoid(-gap))
    return torch.stack(losses).mean()


def process(loop: Loop, rows: list[Any]) -> Tensor:
    terms = []
    for row in rows:
        good = loop.policy(input_ids=torch.tensor([row.answer.input_ids])).logits[0].softmax(-1)[:, 1]
        ends, labels = torch.tensor(row.answer.loss_mask), torch.tensor(row.labels, dtype=torch.float64)
        terms.append(binary_cross_entropy(good[ends], labels, reduction="none"))
    return torch.cat(terms).mean()


BCO = {"ref_model": "@reference", "beta": 0.5, "shift_decay": 0.6, "desirable_weight": 1.2}
LOOPS: list[tuple[type, dict[str, Any], Callable[[Loop, list[Any]], Tensor]]] = [
    (SFTModule, {"lr": 0.1}, sft),
    (DFTModule, {"lr": 0.1}, dft),
    (DistillationModule, {}, forward_kl),
    (DistillationModule, {"divergence": JensenShannon(0.2), "temperature": 2.0, "distillation_coef": 0.3}, mixed),
    (DistillationModule, {"divergence": "reverse_kl", "top_k": 5}, bucketed),
    (DPOModule, {}, dpo),
    (SimPOModule, {"beta": 2.5, "gamma": 0.5}, simpo),
    (CPOModule, {}, cpo),
    (ORPOModule, {"beta": 0.2}, orpo),
    (KTOModule, {}, kto),
    (BCOModule, BCO | {"undesirable_weight": 0.7}, bco),
    (BCOModule, BCO | {"match_prompts": True}, matched_bco),
    (RewardModule, {}, reward),
    (ProcessRewardModule, {}, process),
]
CLASSIFIERS: dict[type, Any] = {
    RewardModule: hf.AutoModelForSequenceClassification,
    ProcessRewardModule: hf.AutoModelForTokenClassification,
}


# Llama's norms round to float32 in any precision, and where sums are in another order the last bits before them differ:
# with other rows beside them (DPO, BCO), and with AVX2 in every module.
CLOSE = (5e-7, 1e-6, 1e-7)
"""Tolerances of losses, and relative and absolute ones of weights; other ones of models with a head."""
CLOSE_CLASSIFIERS = (3e-6, 1e-5, 1e-6)


def by_sgd(model: Any, loss_of: Callable[[list[int]], Tensor], lr: float) -> list[float]:
    """The losses of steps on rows in the order in which loaders shuffle them; the model is trained."""
    losses = []
    for epoch in range(EPOCHS):
        order = permutation(ROWS, seed=0, number=epoch)
        for start in range(0, ROWS, STEP):
            loss = loss_of(list(order[start : start + STEP]))
            loss.backward()
            losses.append(float(loss.detach()))
            sgd_by_hand(model, lr=lr)
    return losses


@pytest.mark.parametrize(("kind", "knobs", "loss"), LOOPS)
def test_training_is_the_loop_by_hand(
    folder: Path, tmp_path: Path, kind: type, knobs: dict[str, Any], loss: Callable[[Loop, list[Any]], Tensor]
) -> None:
    start = data_runs.plain_module(folder, kind, **knobs)
    start.configure_model()
    start.save_pretrained(tmp_path / "start")

    def exact(path: Path, auto: Any = hf.AutoModelForCausalLM) -> Any:
        return auto.from_pretrained(path, dtype=torch.float64, attn_implementation="eager").eval()

    policy = exact(tmp_path / "start", CLASSIFIERS.get(kind, hf.AutoModelForCausalLM))
    source = data_runs.data(folder, kind, tokenizer=tiny_tokenizer())
    source.setup()
    embeddings = policy.get_input_embeddings().weight.detach().clone()
    loop = Loop(policy, exact(folder / "reference"), exact(folder / "teacher"), source.examples, embeddings)

    def loss_of(numbers: list[int]) -> Tensor:
        loop.numbers = numbers
        return loss(loop, [source.examples[number] for number in numbers])

    losses = by_sgd(policy, loss_of, start.lr)
    given = knobs | {"loading": ModelLoading(attention="eager")}
    run = data_runs.fit(folder, kind, 2, knobs=given, precision="64-true")
    close, rtol, atol = CLOSE_CLASSIFIERS if kind in CLASSIFIERS else CLOSE
    assert run.totals == pytest.approx(losses, rel=close)
    trained = run.module.policy.model if kind in CLASSIFIERS else run.module.policy
    for name, expected in policy.state_dict().items():
        torch.testing.assert_close(trained.state_dict()[name], expected, rtol=rtol, atol=atol)
