import pytest
import torch

from rlhfkit.losses import grpo_loss, ppo_loss

from .policy_cases import OPENRLHF, TRL, gradient, policy_batch, tensors

OPENRLHF_CASES = OPENRLHF["policy(loss,clip_ratio,ppo_kl,vllm_kl)"]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("ppo", {}),
        ("ppo_low.2_high.28", {"clip_high": 0.28}),
        ("ppo_dual1.5", {"dual_clip": 1.5}),
        ("ppo_seqmean", {"aggregation": "sequence-mean-token-mean"}),
        ("ppo_global_N20_dp2", {"denominator": 20 / 2}),
    ],
)
def test_openrlhf_golden_ppo(name, arguments):
    inputs = tensors(OPENRLHF["inputs"])
    got = ppo_loss(inputs["logp"], inputs["old"], inputs["adv"], inputs["mask"], **arguments)
    loss, clip_fraction, ppo_kl, _ = OPENRLHF_CASES[name]
    assert got.loss.item() == pytest.approx(loss, abs=1e-6)
    assert got.metrics["policy/clip_fraction"].item() == pytest.approx(clip_fraction, abs=1e-6)
    assert got.metrics["policy/ppo_kl"].item() == pytest.approx(ppo_kl, abs=1e-6)


@pytest.mark.parametrize("name", ["grpo", "grpo/beta", "grpo/tool", "grpo/delta1.2", "dapo/beta", "dr_grpo/beta"])
def test_trl_golden_grpo(name):
    case = next(case for case in TRL["grpo_loss"]["cases"] if case["name"] == name)
    inputs = tensors(TRL["grpo_loss"]["inputs"])
    mask = inputs["completion_mask"] * (inputs["tool_mask"] if case["tool_mask"] else 1)
    aggregation, max_length = {
        "grpo": ("sequence-mean-token-mean", None),
        "dapo": ("token-mean", None),
        "dr_grpo": ("constant-length", 12),
    }[case["args"]["loss_type"]]
    leaf = inputs["per_token_logps"].requires_grad_()
    got = grpo_loss(
        leaf,
        inputs[case["old"]],
        inputs["advantages"],
        mask,
        delta=case["args"].get("delta"),
        ref_logprobs=inputs["ref_per_token_logps"],
        kl_coef=case["args"].get("beta", 0.0),
        kl_importance_weight=True,
        aggregation=aggregation,
        max_length=max_length,
    )
    assert got.loss.item() == pytest.approx(case["loss"], rel=1e-6)
    torch.testing.assert_close(gradient(got.loss, leaf), torch.tensor(case["grad"], dtype=torch.float64))


@pytest.mark.parametrize("loss", [ppo_loss, grpo_loss])
def test_masked_nan_reaches_neither_loss_nor_gradient(loss):
    batch = policy_batch().leaf()
    expected = loss(*batch)
    holes = [torch.where(batch.mask, tensor.detach(), torch.nan) for tensor in batch[:3]]
    leaf = holes[0].requires_grad_()
    got = loss(leaf, holes[1], holes[2], batch.mask)
    torch.testing.assert_close(got.loss, expected.loss)
    torch.testing.assert_close(gradient(got.loss, leaf), gradient(expected.loss, batch.logprobs))


@pytest.mark.parametrize("loss", [ppo_loss, grpo_loss])
def test_compiles_without_graph_breaks(loss):
    batch = policy_batch().leaf()
    got = torch.compile(loss, fullgraph=True, backend="aot_eager")(*batch)
    torch.testing.assert_close(got.loss, loss(*batch).loss)
