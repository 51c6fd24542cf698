"""BCOModule against a loop written by hand."""

from pathlib import Path

import pytest
import torch
from plain_sgd import PlainSGD
from tiny_models import tiny_tokenizer
from torch import Tensor
from torch.nn.functional import logsigmoid

from modules import kto_cases
from modules.data_runs import Steps, answer_logprob, by_sgd, exact, folder_of, trainer
from rlhfkit import BCOModule
from rlhfkit.data.formats import prompt_tokens
from rlhfkit.losses.preference.unpaired import density_ratio_weights
from rlhfkit.models import ModelLoading

BETA, DECAY, LR, STEP, WANTED, UNWANTED = 0.5, 0.6, 2e-3, 8, 1.2, 0.7


class PlainBCO(PlainSGD, BCOModule):
    """BCO with SGD."""


folder = folder_of(kto_cases.prepare)


def by_hand(folder: Path, *, matched: bool) -> dict[str, Tensor]:
    """Weights after two epochs of three steps, one text at a time."""
    source = kto_cases.data(folder, STEP, tokenizer=tiny_tokenizer())
    source.setup()
    examples, policy, reference = source.examples, exact(folder / "model"), exact(folder / "reference")
    table = policy.get_input_embeddings().weight.detach().clone()
    means = [table[prompt_tokens(examples.answers[row])].mean(0) for row in range(24)]
    ratios = density_ratio_weights(torch.stack(means), torch.tensor(examples.values["desirable"])).tolist()
    averages: dict[bool, list[float]] = {True: [], False: []}

    def loss_of(rows: list[int]) -> Tensor:
        shift, rewards, terms = 0.0, {True: list[float](), False: list[float]()}, []
        for seen in averages.values():
            weights = [(1 - DECAY) * DECAY**age for age in range(len(seen))]
            shift += sum(w * m for w, m in zip(weights, reversed(seen), strict=True)) / max(sum(weights), 1e-12) / 2
        for row in rows:
            with torch.no_grad():
                anchor = answer_logprob(reference, examples[row].answer)
            reward = BETA * (answer_logprob(policy, examples[row].answer) - anchor)
            wanted = examples[row].desirable
            rewards[wanted].append(float(reward.detach()))
            weight = WANTED if wanted else ratios[row] if matched else UNWANTED
            terms.append(-weight * logsigmoid((reward - shift) * (1 if wanted else -1)))
        for wanted, values in rewards.items():
            averages[wanted].append(sum(values) / len(values))
        return torch.stack(terms).mean()

    by_sgd(policy, range(24), loss_of, size=STEP, lr=LR)
    return dict(policy.state_dict())


@pytest.mark.parametrize(("accumulate", "matched"), [(1, True), (4, False)])
def test_bco_is_the_loop_by_hand(folder: Path, accumulate: int, matched: bool) -> None:
    module = PlainBCO(
        str(folder / "model"), ref_model=str(folder / "reference"), lr=LR, beta=BETA, shift_decay=DECAY,
        match_prompts=matched, loading=ModelLoading(attention="eager"), desirable_weight=WANTED,
        undesirable_weight=1.0 if matched else UNWANTED,
    )  # fmt: skip
    steps = Steps()
    run = trainer(folder, accumulate_grad_batches=accumulate, callbacks=[steps], precision="64-true")
    run.fit(module, kto_cases.data(folder, STEP // accumulate))
    for name, expected in by_hand(folder, matched=matched).items():
        torch.testing.assert_close(steps.weights[name], expected, rtol=1e-6, atol=1e-8)
    assert abs(float(module.reward_shift)) > 0.01
