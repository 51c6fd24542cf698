"""A reference that follows the policy of on-policy modules; test_dpo.py has it for pairs, on ranks and with ZeRO."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from rl_runs import setup_run

from rlhfkit import GRPOModule, PPOModule
from rlhfkit.modules.parts import Critic, ValueLoss
from rlhfkit.modules.parts.moving_reference import MovingReference, mix_into

MOVING: dict[str, Any] = {"kl_coef": 0.1, "lr": 0.05}
KINDS: dict[str, Any] = {
    "ppo with one trunk": (
        PPOModule,
        MOVING | {"parts": [Critic(shared=True).plain(), ValueLoss(0.1).plain()]},
        "32-true",
    ),
    "grpo in 16 bits": (GRPOModule, MOVING, "bf16-true"),
}
"""Others: ``parts/test_every_part.py``."""


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


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_follows_and_a_resumed_run_goes_on_bit_for_bit(tmp_path: Path, kind: str) -> None:
    module, arguments, precision = KINDS[kind]

    def run(**fit: Any) -> tuple[Any, Follow]:
        follow = Follow()
        saving = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
        trainer, made, data, _ = setup_run(
            tmp_path, module=module, module_arguments=arguments | {"parts": [MovingReference(2, alpha=0.25)]},
            callbacks=[follow, saving], enable_checkpointing=True, precision=precision,
        )  # fmt: skip
        trainer.fit(made, datamodule=data, **fit)
        return made, follow

    straight, follow = run()
    for name, value in straight.reference.named_parameters():
        expected = follow.expected[name].to(value.dtype)  # rounded once, not at every move
        torch.testing.assert_close(value, expected, rtol=1e-5 if precision == "32-true" else 2**-8, atol=1e-7)
        assert not value.requires_grad
    resumed, _ = run(ckpt_path=str(tmp_path / "epoch=0.ckpt"))
    kept, restored = (made.parts[-1].precise for made in (straight, resumed))
    assert kept.keys() == restored.keys()
    for name, precise in kept.items():
        assert torch.equal(precise, restored[name]), name
    for child in ("policy", "reference"):
        for name, value in getattr(straight, child).named_parameters():
            assert torch.equal(value, resumed.get_submodule(child).get_parameter(name)), (child, name)


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
