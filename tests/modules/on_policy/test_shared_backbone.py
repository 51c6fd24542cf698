"""PPO with policy and critic on one trunk, and with pretraining text, against a loop by hand. Covers ppo.py."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from rl_runs import digits, fit_run
from tiny_models import tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlhfkit import LoRA, PPOModule, RolloutCallback, SamplingSpec, SFTDataModule
from rlhfkit.models import load_causal_lm
from rlhfkit.models.heads import add_value_head, load_scalar_model
from rlhfkit.modules.parts import Critic
from rlhfkit.modules.parts.pretraining_loss import PretrainingLoss
from rlhfkit.rollout import ModuleWeights

from .ppo_cases import BOOTSTRAPPED, CLIPPED, ByHand, Keep, PlainPPO, bootstrapped, check_moved_alike, text_loss

TEXTS = ["to be", "or not to be", "that is", "the question", "whether tis", "nobler", "in the mind", "to suffer"]


def text_data(**arguments: Any) -> SFTDataModule:
    rows = [{"text": text} for text in TEXTS]
    return SFTDataModule(rows, text="text", **({"micro_batch_size": 2} | arguments))


def test_three_iterations_with_text_on_a_shared_backbone_are_the_loop_by_hand(tmp_path: Path) -> None:
    keep = Keep()
    trainer, module, _ = fit_run(
        tmp_path,
        module=PlainPPO,
        module_arguments=BOOTSTRAPPED | {"parts": [CLIPPED, *bootstrapped(shared=True), PretrainingLoss(0.3)]},
        data_arguments={
            "rollout_batch_size": 4, "micro_batch_size": 4, "pretraining_data": text_data(shuffle=False)
        },
        rollouts=RolloutCallback(digits, sampling=SamplingSpec(group_size=4, max_new_tokens=8, temperature=0.8)),
        callbacks=[keep],
        max_epochs=3,
    )  # fmt: skip
    policy: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64)
    reference = copy.deepcopy(policy)
    head: Any = copy.deepcopy(load_scalar_model(str(tmp_path / "model")).model.score).double()  # type: ignore[operator]
    started = copy.deepcopy(head)
    token_ids = [[*module.tokenizer(text)["input_ids"], module.tokenizer.eos_token_id] for text in TEXTS]
    hand = ByHand(policy, reference, policy.model, head, temperature=0.8, bootstrapped=True)
    losses: list[float] = []

    def text(update: int) -> Tensor:
        loss = text_loss(policy, token_ids[4:] if update % 2 else token_ids[:4])
        losses.append(float(loss.detach()))
        return 0.3 * loss

    hand.text = text
    for samples, update in zip(keep.iterations, keep.updates, strict=True):
        hand.iteration(samples, update)
    assert hand.updates == 6
    assert 0 < hand.cut_off < 48
    check_moved_alike(module.policy, policy, reference)
    check_moved_alike(module.policy.value_head, head, started)
    assert float(trainer.callback_metrics["ptx/loss"]) == pytest.approx(sum(losses[4:]) / 2, rel=1e-4)


@pytest.mark.parametrize("lora", [None, LoRA(rank=4)], ids=["full", "lora"])
def test_nobody_outside_sees_the_value_head(tmp_path: Path, lora: LoRA | None) -> None:
    folder = str(tiny_model(tmp_path / "model"))
    module = PPOModule(folder, parts=[Critic(shared=True)], lora=lora)
    module.configure_model()
    with pytest.raises(ValueError, match="has a value head already"):
        add_value_head(module.policy)
    names = [name for name, _ in load_causal_lm(folder).named_parameters()]
    assert [info.name for info in ModuleWeights(module.policy).metadata()] == names
    saved = AutoModelForCausalLM.from_pretrained(module.save_pretrained(tmp_path / "saved"), output_loading_info=True)
    assert not saved[1]["unexpected_keys"]
    groups = {group["name"]: group for group in module.parameter_groups()}
    assert groups["value_head"]["lr"] == module.hparams["critic_lr"]
    assert [tuple(parameter.shape) for parameter in groups["value_head"]["params"]] == [(1, 64)]
    if lora is None:
        assert len(groups["policy"]["params"]) == len(names)
    else:
        module.save_pretrained(tmp_path / "adapter", adapter=True)
        assert len(groups["policy"]["params"]) == 2 * 2 * 7  # A and B of seven layers in two blocks
