"""Weights in 4 bits."""

from pathlib import Path

import pytest
import torch
from tiny_models import tiny_model

from models.test_forward import experience
from rlhfkit.models import LoRA, load_causal_lm, policy_output
from rlhfkit.rollout import ModuleWeights


def test_a_forward_pass_in_eval_mode_changes_neither_weights_nor_training(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="4 bits are bitsandbytes' (extra qlora)")
    model = load_causal_lm(str(tiny_model(tmp_path)), lora=LoRA(rank=2), quantization="nf4")
    batch, merged, logprobs, gradients = experience([(3, 5), (7, 1), (1, 9)]), [], [], []
    for _ in range(2):
        out = policy_output(model.train(), batch, batch.action_mask).logprobs
        model.zero_grad()
        out.sum().backward()
        logprobs.append(out.detach())
        gradients.append({name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None})
        merged.append({name: tensor.clone() for name, tensor in ModuleWeights(model)})
        with torch.no_grad():
            evaluated = policy_output(model.eval(), batch, batch.action_mask).logprobs
        torch.testing.assert_close(evaluated, logprobs[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(*logprobs, rtol=0, atol=0)
    torch.testing.assert_close(*gradients, rtol=0, atol=0)
    torch.testing.assert_close(*merged, rtol=0, atol=0)
