"""The load-balancing loss of a mixture of experts in every module, against Transformers'. Covers ``base.py``."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from plain_sgd import PlainSGD
from rl_runs import digits, fit_run
from tiny_models import tiny_mixture
from transformers import MixtralForCausalLM

from modules import dpo_cases
from modules.data_runs import folder_of
from rlhfkit import (
    DistillationModule,
    DPOModule,
    GRPOModule,
    KTOModule,
    OnPolicyDistillationModule,
    PPOModule,
    PreferenceDataModule,
    ProcessRewardModule,
    RewardModule,
    RolloutCallback,
    SamplingSpec,
    SFTDataModule,
    SFTModule,
    StepwiseDataModule,
    UnpairedPreferenceDataModule,
)
from rlhfkit.models import ModelLoading
from rlhfkit.modules.parts import Critic
from rlhfkit.modules.parts.routers import RouterLoss


def prepare(folder: Path) -> None:
    """A mixture of four experts, two of which each token goes to, and a dense model."""
    dpo_cases.prepare(folder)
    tiny_mixture(folder / "experts")


folder = folder_of(prepare)


def routed(coef: float) -> list[RouterLoss]:
    """The part with a weight, if it has any."""
    return [RouterLoss(coef)] if coef else []


def test_a_dense_model_has_no_router(folder: Path) -> None:
    module = DPOModule(str(folder / "model"), parts=[RouterLoss(0.1)])
    with pytest.raises(ValueError, match="LlamaForCausalLM has no router"):
        dpo_cases.trainer(folder, max_steps=1).fit(module, dpo_cases.data(folder, 8))


class First(L.Callback):
    """The first micro-batch, its loss and the router's."""

    batch: Any = None

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.batch is None:
            self.batch, self.loss = batch, float(outputs["loss"])
            self.router = float(trainer.callback_metrics.get("aux_loss", torch.nan))

    def balance(self, folder: Path) -> float:
        """Transformers' loss of the language model on the rows of the micro-batch, whose padding it leaves out."""
        model = MixtralForCausalLM.from_pretrained(folder / "experts")
        ids, real = self.batch.input_ids, self.batch.attention_mask.long()
        with torch.no_grad():
            return float(model(input_ids=ids, attention_mask=real, output_router_logits=True).aux_loss)


def first_losses(run: Any, folder: Path, mixtures: int) -> float:
    """The first loss grows by the router's loss of each mixture, times its weight; what is logged of it, as a share."""
    found = {}
    for coef in (0.0, 0.5):
        found[coef] = First()
        run(coef, found[coef])
    balance = found[0.5].balance(folder)
    assert balance > 0.1
    assert found[0.5].loss - found[0.0].loss == pytest.approx(mixtures * 0.5 * balance, rel=1e-4)
    return found[0.5].router / balance


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

    def run(coef: float, losses: First) -> None:
        arguments: dict[str, Any] = {"loading": ModelLoading(attention="eager"), **paths}
        arguments["parts"] = [*more.get("parts", ()), *routed(coef)]
        fit_run(
            folder / "rl",
            module=lambda _, **others: made(str(folder / "experts"), **arguments, **others),
            data_arguments={"rollout_batch_size": 2, "micro_batch_size": 4},
            rollouts=RolloutCallback(digits, sampling=SamplingSpec(group_size=2, max_new_tokens=6)),
            callbacks=[losses],
            accumulate_grad_batches=1,
            max_steps=1,
        )

    first_losses(run, folder, mixtures)


ON_DATA: dict[str, tuple[Any, dict[str, Any], Any, dict[str, Any]]] = {
    "sft": (SFTModule, {}, SFTDataModule, {"prompt": "1+1=", "completion": "2"}),
    "kto": (
        KTOModule,
        {"loss_type": "apo_zero_unpaired"},
        UnpairedPreferenceDataModule,
        {"prompt": "1+1=", "completion": "2", "label": True},
    ),
    "distillation": (DistillationModule, {"teacher": "model"}, SFTDataModule, {"prompt": "1+1=", "completion": "2"}),
    # Prompts of no tokens, since those of a pair go through the model once.
    "dpo": (DPOModule, {}, PreferenceDataModule, {"prompt": "", "chosen": "2", "rejected": "oh"}),
    "reward": (RewardModule, {}, PreferenceDataModule, {"prompt": "", "chosen": "2", "rejected": "oh"}),
    "process": (
        ProcessRewardModule,
        {},
        StepwiseDataModule,
        {"prompt": "1?", "completions": ["a", "bc"], "labels": [1, 0]},
    ),
}


@pytest.mark.parametrize("attention", [None, "eager"])
@pytest.mark.parametrize("kind", ON_DATA)
def test_the_router_is_balanced_while_a_mixture_learns_from_data(
    folder: Path, kind: str, attention: str | None
) -> None:
    made, more, data, row = ON_DATA[kind]
    paths = {name: str(folder / value) if name == "teacher" else value for name, value in more.items()}

    def run(coef: float, losses: First) -> None:
        module = made(str(folder / "experts"), parts=routed(coef), loading=ModelLoading(attention=attention), **paths)
        dpo_cases.trainer(folder, max_steps=1, callbacks=[losses]).fit(module, data([row], micro_batch_size=1))

    logged = first_losses(run, folder, 1)
    assert logged == pytest.approx(1.0, rel=1e-4) or kind != "dpo"  # others log it later


def test_a_reward_models_router_learns_by_the_gradient_of_transformers_loss(folder: Path) -> None:
    class PlainReward(PlainSGD, RewardModule): ...

    weights, rows = [], [{"prompt": "", "chosen": "2", "rejected": "oh"}]
    for coef in (0.0, 0.5):
        module = PlainReward(str(folder / "experts"), lr=1.0, parts=routed(coef))
        dpo_cases.trainer(folder, max_steps=1, callbacks=[losses := First()]).fit(
            module, PreferenceDataModule(rows, micro_batch_size=1)
        )
        weights.append(dict(module.policy.model.model.named_parameters()))
    model = MixtralForCausalLM.from_pretrained(folder / "experts")
    ids, real = losses.batch.input_ids, losses.batch.attention_mask.long()
    (0.5 * model(input_ids=ids, attention_mask=real, output_router_logits=True).aux_loss).backward()
    moved = [name for name, p in model.model.named_parameters() if p.grad is not None and p.grad.abs().max() > 1e-4]
    assert any("gate" in name for name in moved)
    for name in moved:
        difference = (weights[0][name] - weights[1][name]).detach()
        torch.testing.assert_close(difference, model.model.get_parameter(name).grad, rtol=1e-3, atol=1e-5)


def test_an_overridden_forward_pass_that_forgets_the_router_is_named(folder: Path) -> None:
    class Own(RewardModule):
        def scores(self, batch: Any) -> Any:
            from rlhfkit.models import reward_output

            return reward_output(self.policy, batch)

    module = Own(str(folder / "experts"), parts=[RouterLoss(0.5)])
    data = PreferenceDataModule([{"prompt": "", "chosen": "2", "rejected": "oh"}], micro_batch_size=1)
    with pytest.raises(ValueError, match="the forward pass gave none"):
        dpo_cases.trainer(folder, max_steps=1).fit(module, data)
