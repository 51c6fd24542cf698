"""The load-balancing loss of a mixture of experts in every module, against Transformers'. Covers ``base.py``."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from rl_runs import digits, fit_run
from tiny_models import tiny_mixture
from transformers import MixtralForCausalLM

from modules import data_runs
from modules.data_runs import DATA, SOURCES, folder_of, plain_module, row, trainer
from rlhfkit import (
    DistillationModule,
    DPOModule,
    GRPOModule,
    KTOModule,
    OnPolicyDistillationModule,
    PPOModule,
    ProcessRewardModule,
    RewardModule,
    RolloutCallback,
    SamplingSpec,
    SFTModule,
)
from rlhfkit.models import ModelLoading, reward_output
from rlhfkit.modules.parts import Critic
from rlhfkit.modules.parts.routers import RouterLoss


def prepare(folder: Path) -> None:
    """A mixture of four experts, two of which each token goes to, and a dense model."""
    data_runs.prepare(folder)
    tiny_mixture(folder / "experts")


folder = folder_of(prepare)


def test_a_dense_model_has_no_router(folder: Path) -> None:
    module = DPOModule(str(folder / "model"), parts=[RouterLoss(0.1)])
    with pytest.raises(ValueError, match="LlamaForCausalLM has no router"):
        trainer(folder, max_steps=1).fit(module, data_runs.data(folder, DPOModule))


class First(L.Callback):
    """The first micro-batch, its loss and the router's, and Transformers' for the language model."""

    batch: Any = None

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.batch is None:
            self.batch, self.loss = batch, float(outputs["loss"])
            self.router = float(trainer.callback_metrics.get("aux_loss", torch.nan))

    def model(self, folder: Path) -> Any:
        """The language model, with the gradient of its router's loss on the rows, whose padding it leaves out."""
        model = MixtralForCausalLM.from_pretrained(folder / "experts")
        ids, real = self.batch.input_ids, self.batch.attention_mask.long()
        self.balance = model(input_ids=ids, attention_mask=real, output_router_logits=True).aux_loss
        self.balance.backward()
        return model


def check_losses(plain: First, routed: First, mixtures: int = 1) -> None:
    """The first loss grows by the router's loss of each mixture, times its weight."""
    assert float(routed.balance) > 0.1
    assert routed.loss - plain.loss == pytest.approx(mixtures * 0.5 * float(routed.balance), rel=1e-4)


@pytest.mark.parametrize(
    ("made", "more", "mixtures"),
    [
        (GRPOModule, {}, 1),
        (PPOModule, {}, 2),  # the critic is made of the policy, so it is another mixture with the same router
        (PPOModule, {"critic": "model"}, 1),
        (PPOModule, {"parts": [Critic(shared=True).plain()]}, 1),
        (OnPolicyDistillationModule, {"teacher": "model", "divergence": "reverse_kl"}, 1),
    ],
    ids=["grpo", "ppo", "ppo_dense_critic", "ppo_shared", "distillation"],
)
def test_the_router_is_balanced_while_a_mixture_learns_from_its_samples(
    folder: Path, made: Any, more: dict[str, Any], mixtures: int
) -> None:
    paths = {name: str(folder / value) if value == "model" else value for name, value in more.items()}
    plain, balanced = First(), First()
    for losses, parts in ((plain, []), (balanced, [RouterLoss(0.5)])):
        arguments: dict[str, Any] = paths | {"parts": [*more.get("parts", ()), *parts]}
        fit_run(
            folder / "rl",
            module=lambda _, **others: made(str(folder / "experts"), **others),
            module_arguments=arguments | {"loading": ModelLoading(attention="eager")},
            data_arguments={"rollout_batch_size": 2, "micro_batch_size": 4},
            rollouts=RolloutCallback(digits, sampling=SamplingSpec(group_size=2, max_new_tokens=6)),
            callbacks=[losses],
            accumulate_grad_batches=1,
            max_steps=1,
        )
    balanced.model(folder)
    check_losses(plain, balanced, mixtures)


@pytest.mark.parametrize("attention", [None, "eager"])
@pytest.mark.parametrize(
    "kind", [SFTModule, KTOModule, DistillationModule, DPOModule, RewardModule, ProcessRewardModule]
)
def test_the_router_is_balanced_while_a_mixture_learns_from_data(
    folder: Path, kind: type, attention: str | None
) -> None:
    """By value, and by the gradient: a step of rate 1 differs by it."""
    data = DATA.get(kind, "pairs")
    # Of pairs prompts of no tokens, since those of a pair go through the model once.
    example = row(data, 1) | ({"prompt": ""} if data == "pairs" else {})
    more = {"loss_type": "apo_zero_unpaired"} if kind is KTOModule else {}
    plain, balanced, trained = First(), First(), []
    for losses, parts in ((plain, []), (balanced, [RouterLoss(0.5)])):
        loading = ModelLoading(attention=attention)
        module = plain_module(folder, kind, model="@experts", lr=1.0, parts=parts, loading=loading, **more)
        trainer(folder, max_steps=1, callbacks=[losses]).fit(module, SOURCES[data]([example], micro_batch_size=1))
        trained.append(dict(module.policy.model.base_model.named_parameters()))
    expected = balanced.model(folder).base_model
    check_losses(plain, balanced)
    assert balanced.router == pytest.approx(float(balanced.balance), rel=1e-4) or kind is not DPOModule  # logged later
    moved = [name for name, p in expected.named_parameters() if p.grad is not None and p.grad.abs().max() > 1e-4]
    assert any("gate" in name for name in moved)
    for name in moved:
        difference = (trained[0][name] - trained[1][name]).detach()
        torch.testing.assert_close(difference, 0.5 * expected.get_parameter(name).grad, rtol=1e-3, atol=1e-5)


def test_an_overridden_forward_pass_that_forgets_the_router_is_named(folder: Path) -> None:
    class Own(RewardModule):
        def scores(self, batch: Any) -> Any:
            return reward_output(self.policy, batch)

    module = Own(str(folder / "experts"), parts=[RouterLoss(0.5)])
    with pytest.raises(ValueError, match="the forward pass gave none"):
        trainer(folder, max_steps=1).fit(module, data_runs.data(folder, RewardModule))
