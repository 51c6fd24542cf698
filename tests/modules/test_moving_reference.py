"""A reference that follows the policy of on-policy modules; ``test_data_ranks.py`` has it for pairs, also with ZeRO."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from rl_runs import fit_run, setup_run

from rlhfkit import GRPOModule, PPOModule
from rlhfkit.modules.parts import Critic, MovingReference, ValueLoss
from rlhfkit.modules.parts.moving_reference import mix_into


class Follow(L.Callback):
    """Keeps what the reference should be: mixed from the policy after every second step."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.step = 0
        self.expected = {name: value.float().clone() for name, value in pl_module.reference.named_parameters()}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if trainer.global_step > self.step and trainer.global_step % 2 == 0:
            policy = dict(pl_module.policy.named_parameters())
            for name, old in self.expected.items():
                old.copy_(0.75 * old + 0.25 * policy[name].detach().float())
        self.step = trainer.global_step


@pytest.mark.parametrize(
    ("module", "parts", "precision"),
    [
        (PPOModule, [Critic(shared=True).plain(), ValueLoss(0.1).plain()], "32-true"),
        (GRPOModule, [], "bf16-true"),
    ],
    ids=["ppo with one trunk", "grpo in 16 bits"],
)
def test_the_reference_follows_and_a_resumed_run_goes_on_bit_for_bit(
    tmp_path: Path, module: Any, parts: list[Any], precision: str
) -> None:
    """Other modules are resumed in ``test_step_properties.py`` and ``parts/test_every_part.py``."""

    def run(**more: Any) -> tuple[Any, Follow]:
        follow, saving = Follow(), ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
        arguments = {"kl_coef": 0.1, "lr": 0.05, "parts": [*parts, MovingReference(2, alpha=0.25)]}
        _, made, _ = fit_run(
            tmp_path, module=module, module_arguments=arguments, callbacks=[follow, saving], enable_checkpointing=True,
            precision=precision, **more,
        )  # fmt: skip
        return made, follow

    (straight, follow), (resumed, _) = run(), run(resume=str(tmp_path / "epoch=0.ckpt"))
    for name, value in straight.reference.named_parameters():
        expected = follow.expected[name].to(value.dtype)  # rounded once, not at every move
        torch.testing.assert_close(value, expected, rtol=1e-5 if precision == "32-true" else 2**-8, atol=1e-7)
        assert not value.requires_grad
    kept, restored = (made.parts[-1].precise for made in (straight, resumed))
    assert kept.keys() == restored.keys()
    assert all(torch.equal(precise, restored[name]) for name, precise in kept.items())
    for name, value in straight.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_small_steps_of_a_reference_in_16_bits_add_up(dtype: torch.dtype) -> None:
    """After n moves of 1% towards a policy that stays, 0.99^n of the distance is left: 0.5 after 69."""
    reference, policy = (torch.nn.Linear(8, 8, bias=False, dtype=dtype) for _ in range(2))
    start, precise = reference.weight.detach().double(), dict[str, torch.Tensor]()
    for _ in range(69):
        mix_into(reference, policy, 0.01, precise)
    wanted = policy.weight.double() + 0.99**69 * (start - policy.weight.double())
    torch.testing.assert_close(reference.weight.double(), wanted, rtol=2**-8, atol=1e-5)
    assert bool(precise) == (dtype != torch.float32)


def test_a_reference_that_cannot_move_is_refused(tmp_path: Path) -> None:
    trainer, module, data, _ = setup_run(
        tmp_path, module_arguments={"lora": {"rank": 2}, "kl_coef": 0.1, "parts": [MovingReference(1)]}
    )
    with pytest.raises(ValueError, match="adapters are trained"):
        trainer.fit(module, datamodule=data)
