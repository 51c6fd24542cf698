"""BCOModule against a loop written by hand."""

from pathlib import Path
from typing import Any

import pytest
import torch
from plain_sgd import PlainSGD
from tiny_models import tiny_tokenizer

from modules import kto_cases
from rlhfkit import BCOModule
from rlhfkit.data.formats import prompt_tokens
from rlhfkit.data.packing import permutation
from rlhfkit.losses.preference.unpaired import density_ratio_weights
from rlhfkit.models import ModelLoading, load_causal_lm

BETA, DECAY, LR, STEP = 0.5, 0.6, 2e-3, 8


class PlainBCO(PlainSGD, BCOModule):
    """BCO with SGD."""


def logprob(model: Any, example: Any) -> torch.Tensor:
    ids = torch.tensor([example.input_ids])
    every = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    return every[torch.tensor(example.loss_mask[1:])].sum()


def load(folder: Path, name: str) -> Any:
    return load_causal_lm(str(folder / name), loading=ModelLoading(attention="eager"), dtype=torch.float64)


def descend(policy: Any) -> None:
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter -= LR * parameter.grad
    policy.zero_grad()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bco")
    kto_cases.prepare(folder)
    return folder


def by_hand(folder: Path, *, matched: bool) -> dict[str, torch.Tensor]:
    """Weights after two epochs of three steps, one text at a time."""
    source = kto_cases.data(folder, STEP, tokenizer=tiny_tokenizer())
    source.setup()
    examples, policy, reference = source.examples, load(folder, "model"), load(folder, "reference")
    table = policy.get_input_embeddings().weight.detach().clone()
    means = [table[prompt_tokens(examples.answers[row])].mean(0) for row in range(24)]
    ratios = density_ratio_weights(torch.stack(means), torch.tensor(examples.values["desirable"])).tolist()
    averages: dict[bool, list[float]] = {True: [], False: []}
    for epoch in range(2):
        order = permutation(24, seed=0, number=epoch)
        for start in range(0, 24, STEP):
            shift, rewards = 0.0, {True: [], False: []}  # type: ignore[var-annotated]
            for seen in averages.values():
                weights = [(1 - DECAY) * DECAY**age for age in range(len(seen))]
                shift += sum(w * m for w, m in zip(weights, reversed(seen), strict=True)) / max(sum(weights), 1e-12) / 2
            total = torch.zeros((), dtype=torch.float64)
            for row in order[start : start + STEP]:
                with torch.no_grad():
                    anchor = logprob(reference, examples[row].answer)
                reward = BETA * (logprob(policy, examples[row].answer) - anchor)
                wanted = examples[row].desirable
                rewards[wanted].append(float(reward.detach()))
                weight = ratios[row] if matched and not wanted else 1.0
                total = total - weight * torch.nn.functional.logsigmoid((reward - shift) * (1 if wanted else -1))
            (total / STEP).backward()
            descend(policy)
            for wanted, values in rewards.items():
                averages[wanted].append(sum(values) / len(values))
    return dict(policy.state_dict())


@pytest.mark.parametrize(("accumulate", "matched"), [(1, True), (4, False)])
def test_bco_is_the_loop_by_hand(folder: Path, accumulate: int, matched: bool) -> None:
    module = PlainBCO(
        str(folder / "model"), ref_model=str(folder / "reference"), lr=LR, beta=BETA, shift_decay=DECAY,
        match_prompts=matched, loading=ModelLoading(attention="eager"),
    )  # fmt: skip
    steps = kto_cases.Steps()
    steps.on_before_optimizer_step = lambda *_: None  # type: ignore[method-assign]
    trainer = kto_cases.trainer(folder, accumulate_grad_batches=accumulate, callbacks=[steps], precision="64-true")
    trainer.fit(module, kto_cases.data(folder, STEP // accumulate))
    for name, expected in by_hand(folder, matched=matched).items():
        torch.testing.assert_close(steps.weights[name], expected, rtol=1e-6, atol=1e-8)
    assert abs(float(module.reward_shift)) > 0.01
