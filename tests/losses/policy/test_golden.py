"""Every policy loss against the values and gradients of the projects people come from.

Where a project does something that is left behind on purpose, the test says so with a comment that starts "Quirk".
"""

import json

import pytest
import torch

from rlhfkit import losses
from rlhfkit.losses.policy.base import policy_tokens

from ..policy_cases import FIELD, OPENRLHF, TRL, gradient, tensors

TRL_INPUTS = tensors(TRL["grpo_loss"]["inputs"])
TRL_CASES = {case["name"]: case for case in TRL["grpo_loss"]["cases"]}
TRL_AGGREGATION = {
    "grpo": {"aggregation": "sequence-mean-token-mean"},
    "sapo": {"aggregation": "sequence-mean-token-mean"},
    "luspo": {"aggregation": "sequence-mean-token-sum"},
    "dr_grpo": {"aggregation": "constant-length", "max_length": 12},
}
FIELD_INPUTS = tensors(FIELD["inputs"])
VERL = {name: case for name, case in FIELD["verl_policy_loss"].items() if name != "_config"}
MOLT = FIELD["molt_policy_loss(clip .2/.28; cispo cap 1.28)"]


def field(advantages="adv_seq"):
    """Inputs of a policy loss; the first collects a gradient."""
    leaf = FIELD_INPUTS["new"].clone().requires_grad_()
    return leaf, FIELD_INPUTS["old"], FIELD_INPUTS[advantages], FIELD_INPUTS["mask"]


def check(output, leaf, case, tolerance=1e-10):
    assert output.loss.item() == pytest.approx(case["loss"], rel=tolerance, abs=tolerance)
    expected = torch.tensor(case["grad"], dtype=torch.float64)
    torch.testing.assert_close(gradient(output.loss, leaf), expected, rtol=tolerance, atol=tolerance)


def trl_surrogate(case, leaf, mask, weights, reduction):
    """The loss of a TRL case without its KL penalty and entropy bonus."""
    args = case["args"]
    kind = args.get("loss_type", "gmpo")
    level = args.get("importance_sampling_level", "token")
    inputs = leaf, TRL_INPUTS[case["old"]], TRL_INPUTS["advantages"], mask
    if case["per_token_advantages"]:
        inputs = leaf, inputs[1], TRL_INPUTS["advantages_per_token"], mask
    if kind == "cispo":
        return losses.cispo_loss(*inputs, ratio_max=args["epsilon_high"], ratio_level=level, weights=weights)
    if kind == "sapo":
        return losses.sapo_loss(*inputs, ratio_level=level, weights=weights)
    if kind == "vespo":
        names = {"k_pos": "k_positive", "lambda_pos": "lambda_positive"}
        names |= {"k_neg": "k_negative", "lambda_neg": "lambda_negative"}
        given = {ours: args[f"vespo_{theirs}"] for theirs, ours in names.items() if f"vespo_{theirs}" in args}
        return losses.vespo_loss(*inputs, **given, weights=weights)
    if kind == "gmpo":
        return losses.gmpo_loss(*inputs)
    # Quirk: TRL clips a sequence's ratio with the 0.2 of a token's unless told otherwise.
    knobs = {"clip_low": args.get("epsilon", 0.2), "clip_high": args.get("epsilon_high", 0.2), "weights": weights}
    if kind == "luspo" and level == "sequence":
        return losses.luspo_loss(*inputs, **knobs)
    if kind == "luspo" or level == "sequence":
        return losses.ppo_loss(*inputs, **knobs, ratio_level=level, **reduction)
    length = {"max_length": 12} if kind == "dr_grpo" else {}
    return getattr(losses, f"{kind}_loss")(*inputs, **knobs, **length, delta=args.get("delta"))


@pytest.mark.parametrize("name", TRL_CASES)
def test_trl_grpo_trainer(name):
    case, args = TRL_CASES[name], TRL_CASES[name]["args"]
    kind = args.get("loss_type", "gmpo")
    mask = TRL_INPUTS["completion_mask"] * (TRL_INPUTS["tool_mask"] if case["tool_mask"] else 1)
    leaf = TRL_INPUTS["per_token_logps"].clone().requires_grad_()
    entropy = TRL_INPUTS["entropies"].clone().requires_grad_()
    reduction = TRL_AGGREGATION.get(kind, {"aggregation": "token-mean"})
    weights = TRL_INPUTS[f"importance_sampling_ratio_{case['vllm_is']}"] if case["vllm_is"] else None
    if "off_policy_mask_threshold" in args:
        sampled = TRL_INPUTS["sampling_per_token_logps" if case["uses_sampling_logps"] else case["old"]]
        inputs, limit = (TRL_INPUTS["advantages"], leaf, sampled, mask), args["off_policy_mask_threshold"]
        weights = losses.off_policy_sequence_mask(*inputs, threshold=limit).double()
    if "top_entropy_quantile" in args:
        sure = losses.top_entropy_mask(entropy, mask, fraction=args["top_entropy_quantile"])
        weights = sure.double()
    output = trl_surrogate(case, leaf, mask, weights, reduction)
    if "policy_loss" in case["metrics"]:
        assert output.loss.item() == pytest.approx(case["metrics"]["policy_loss"], rel=1e-6)
    if "beta" in args:
        level = args.get("importance_sampling_level", "token")
        ratio = policy_tokens(leaf, TRL_INPUTS[case["old"]], TRL_INPUTS["advantages"], mask).ratio_of(level)
        penalty = losses.kl_loss(
            leaf, TRL_INPUTS["ref_per_token_logps"], mask, coef=args["beta"], importance_weight=ratio, **reduction
        )
        assert penalty.metrics["policy/ref_kl"].item() == pytest.approx(case["metrics"]["kl"], rel=1e-6)
        output = losses.sum_losses(output, penalty)
    if args.get("entropy_coef"):
        # Quirk: TRL's bonus is a mean over the tokens that pass the quantile, whatever the loss averages over.
        bonus = losses.entropy_bonus(entropy, sure, coef=args["entropy_coef"])
        torch.testing.assert_close(
            gradient(bonus.loss, entropy), torch.tensor(case["grad_entropies"], dtype=torch.float64)
        )
        output = losses.sum_losses(output, bonus)
    # TRL holds SAPO's temperatures in float32, in which 1.05 is off by 5e-8.
    check(output, leaf, case, 1e-6 if kind == "sapo" else 1e-10)
    if "clip_ratio/low_mean" in case["metrics"] and kind != "gmpo":
        for side in ("low", "high"):
            expected = case["metrics"][f"clip_ratio/{side}_mean"]
            assert output.metrics[f"policy/clip_fraction_{side}"].item() == pytest.approx(expected)
    if "vespo/phi_seq_mean" in case["metrics"] and "off_policy_mask_threshold" not in args:
        expected = case["metrics"]["vespo/phi_seq_mean"]
        assert output.metrics["policy/vespo_weight"].item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("case", TRL["rloo_loss"]["cases"], ids=lambda case: case["name"])
def test_trl_rloo_trainer(case):
    leaf, mask = TRL_INPUTS["per_token_logps"].clone().requires_grad_(), TRL_INPUTS["completion_mask"]
    output = losses.rloo_loss(
        leaf, TRL_INPUTS[case["old"]], TRL_INPUTS["advantages"], mask, clip_high=case["args"].get("epsilon_high", 0.2)
    )
    check(output, leaf, case)
    # Quirk: TRL's clip ratio counts sequences; here, as everywhere, tokens count.
    log_ratio = ((leaf - TRL_INPUTS[case["old"]]) * mask).sum(-1)
    clipped = (log_ratio.exp() < 0.8) & (TRL_INPUTS["advantages"] < 0)
    assert clipped.float().mean().item() == pytest.approx(case["metrics"]["clip_ratio/low_mean"])
    counted = (clipped * mask.sum(-1)).sum() / mask.sum()
    assert output.metrics["policy/clip_fraction_low"].item() == pytest.approx(counted.item())


def verl_clip_cov_priority(leaf, advantages, mask):
    """The candidates' indices are shuffled in verl; this is the same choice as numbers per token."""
    keep, logprobs, ratio = mask.bool(), leaf.detach(), torch.exp(leaf.detach() - FIELD_INPUTS["old"])
    clipped = ((ratio > 1.28) & (advantages > 0)) | ((ratio < 0.8) & (advantages < 0))
    covariance = (advantages - advantages[keep].mean()) * (logprobs - logprobs[keep].mean())
    candidates = ((covariance > 0.05) & (covariance < 5) & keep & ~clipped).nonzero()
    torch.manual_seed(1)
    priority = torch.zeros_like(logprobs)
    for rank, index in enumerate(torch.randperm(len(candidates))):
        priority[tuple(candidates[index])] = 1.0 / (1 + rank)
    return priority


COVARIANCES = {"fraction": 0.1, "covariance_low": 0.05, "covariance_high": 5.0}
VERL_LOSSES = {
    "vanilla": (losses.ppo_loss, {"clip_high": 0.28, "dual_clip": 3.0}),
    "cispo": (losses.cispo_loss, {"ratio_min": 0.8, "ratio_max": 1.28}),
    "gpg": (losses.gpg_loss, {}),
    "gspo": (losses.gspo_loss, {"clip_low": 0.2, "clip_high": 0.28}),
    "geo_mean": (losses.gmpo_loss, {"clip_low": 0.2, "clip_high": 0.28}),
    "kl_cov": (losses.kl_cov_loss, {"fraction": 0.15}),
    "clip_cov": (losses.clip_cov_loss, COVARIANCES | {"clip_high": 0.28}),
}
VERL_REDUCTIONS = {
    "token-mean": {},
    "seq-mean-token-mean": {"aggregation": "sequence-mean-token-mean"},
    "seq-mean-token-sum": {"aggregation": "sequence-mean-token-sum"},
    # Quirk: "seq-mean-token-sum-norm" sums over the sequences, and divides by the padded length only.
    "seq-mean-token-sum-norm": {"aggregation": "constant-length", "max_length": 7, "denominator": 1.0},
}


@pytest.mark.parametrize("name", VERL)
def test_verl_policy_losses(name):
    case, (kind, mode) = VERL[name], name.split("|")
    leaf, _, advantages, mask = inputs = field(case["adv"])
    function, knobs = VERL_LOSSES[kind]
    if kind not in ("gspo", "geo_mean"):
        # Quirk: verl's GSPO averages over tokens first, whatever aggregation is asked for.
        knobs = knobs | VERL_REDUCTIONS[mode]
    if kind == "clip_cov":
        knobs = knobs | {"priority": verl_clip_cov_priority(leaf, advantages, mask)}
    output = function(*inputs, **knobs)
    check(output, leaf, case, 1e-8)  # verl adds 1e-8 to its counts
    metrics = case["metrics"]
    if kind == "kl_cov":
        # Quirk: here verl logs the mean of |log ratio| under the name of the KL.
        moved = (leaf.detach() - inputs[1]).abs()
        assert metrics["actor/ppo_kl"] == pytest.approx((moved * mask).sum().item() / mask.sum().item())
    elif metrics:
        assert output.metrics["policy/ppo_kl"].item() == pytest.approx(metrics["actor/ppo_kl"], rel=1e-6)
    if kind in ("vanilla", "cispo", "gspo"):
        assert output.metrics["policy/clip_fraction"].item() == pytest.approx(metrics["actor/pg_clipfrac"])
    if kind == "clip_cov":
        assert output.metrics["policy/covariance_fraction"].item() == pytest.approx(metrics["actor/pg_clipfrac"])


@pytest.mark.parametrize("name", MOLT)
def test_molt_policy_losses(name):
    case, (kind, mode, level, correction, bounds) = MOLT[name], name.split("|")
    leaf, _, _, mask = inputs = field()
    weights = None
    if level != "off":
        low, high = json.loads(bounds)
        knobs = {"level": "token", "mode": correction, "low": low, "high": high}
        if level == "seq":
            # Molt rejects by the sequence and weighs by the token.
            knobs = {"mode": "none", "high": None, "reject": ("sequence", low, high)}
        correction = losses.importance_weights(FIELD_INPUTS["old"], FIELD_INPUTS["rollout"], mask, **knobs)
        weights = correction.weights
        measured = losses.mismatch_metrics(FIELD_INPUTS["old"], FIELD_INPUTS["rollout"], mask)
        assert measured["rollout_corr/kl"].item() == pytest.approx(case["vllm_kl"], rel=1e-6)
        if level == "token":
            fraction = correction.metrics["rollout_corr/is_bounded_fraction"].item()
        else:
            fraction = (~correction.keep).any(-1).double().mean().item()  # of the sequences
        assert fraction == pytest.approx(case["is_filter_ratio"])
    aggregation = "token-mean" if mode == "token-mean" else "sequence-mean-token-mean"
    knobs = {"weights": weights, "aggregation": aggregation}
    if kind == "ppo":
        output = losses.ppo_loss(*inputs, clip_high=0.28, **knobs)
    elif kind == "gspo":
        # Molt's GSPO has the gradient of GSPO-token, which differs where tokens have weights of their own.
        output = losses.gspo_token_loss(*inputs, clip_low=0.2, clip_high=0.28, **knobs)
    else:
        output = losses.cispo_loss(*inputs, ratio_max=1.28, **knobs)
    check(output, leaf, case, 1e-6)  # float32 inside Molt
    assert output.metrics["policy/ppo_kl"].item() == pytest.approx(case["policy_kl"], rel=1e-6)
    assert output.metrics["policy/clip_fraction"].item() == pytest.approx(case["clip_ratio"])


def test_prime_rl_dppo():
    leaf, *_ = inputs = field()
    output = losses.dppo_loss(*inputs, rollout_logprobs=FIELD_INPUTS["rollout"], denominator=1.0)
    check(output, leaf, FIELD["prime_rl"]["dppo_default(mask .2/.2, kl_tau 1e-3, adv_tau 1)"])


def test_prime_rl_on_policy_distillation():
    leaf, old, _, mask = field()
    advantages = losses.on_policy_distillation_advantages(leaf, old, mask)
    # Quirk: prime-rl drops tokens of this stream by their reward advantage, which it has none of, so that the side is
    # always the lower one; here the side is that of the advantage which is trained on.
    advantages[leaf.detach().exp() - FIELD_INPUTS["rollout"].exp() < -0.2] = 0.0
    knobs = {"rollout_logprobs": FIELD_INPUTS["rollout"], "mask_low": 1.0, "mask_high": 1.0, "denominator": 1.0}
    output = losses.dppo_loss(leaf, old, advantages, mask, **knobs)
    check(output, leaf, FIELD["prime_rl"]["ref_kl_opd(ref=old)"], 1e-6)  # float32 inside prime-rl


def test_areal_losses():
    leaf, *_ = inputs = field()
    areal = FIELD["areal"]
    check(losses.sapo_loss(*inputs, aggregation="token-mean"), leaf, areal["sapo(tau 1/1.05, token-mean)"])
    gspo = losses.gspo_loss(*inputs, clip_low=0.2, clip_high=0.2, aggregation="token-mean")
    check(gspo, leaf, areal["gspo(seq) eps .2"])
    # The case leaves the proximal policy equal to the one that sampled, so the weights are 1.
    decoupled = losses.decoupled_ppo_loss(*inputs, rollout_logprobs=inputs[1], dual_clip=3.0)
    check(decoupled, leaf, areal["decoupled_ppo(no rs) eps .2 c 3"])


def test_slime_cispo():
    expected = torch.tensor(FIELD["slime"]["cispo_per_token(eps_low 1.0, high .28)"], dtype=torch.float64)
    got = losses.cispo_loss(*field(), ratio_max=1.28).tokens["loss"]
    torch.testing.assert_close(got, expected * FIELD_INPUTS["mask"], rtol=1e-6, atol=1e-6)  # float32 inside slime


OPENRLHF_CASES = {
    "ppo": (losses.ppo_loss, {}),
    "ppo_low.2_high.28": (losses.ppo_loss, {"clip_high": 0.28}),
    "ppo_dual1.5": (losses.ppo_loss, {"dual_clip": 1.5}),
    "ppo_seqmean": (losses.ppo_loss, {"aggregation": "sequence-mean-token-mean"}),
    "ppo_global_N20_dp2": (losses.ppo_loss, {"denominator": 20 / 2}),
    # Quirk: OpenRLHF clips a sequence's ratio with the 0.2 of a token's.
    "gspo": (losses.gspo_loss, {"clip_low": 0.2, "clip_high": 0.2}),
    "tis": (losses.ppo_loss, {}),
    "seq-mask-tis": (losses.ppo_loss, {}),
}


@pytest.mark.parametrize("name", OPENRLHF["policy(loss,clip_ratio,ppo_kl,vllm_kl)"])
def test_openrlhf_policy_losses(name):
    inputs, (function, knobs) = tensors(OPENRLHF["inputs"]), OPENRLHF_CASES[name]
    loss, clip_fraction, ppo_kl, vllm_kl = OPENRLHF["policy(loss,clip_ratio,ppo_kl,vllm_kl)"][name]
    if vllm_kl is not None:
        preset = {"mode": "clip", "low": 0.5, "high": 5.0} if name == "tis" else losses.CORRECTION_PRESETS[name]
        correction = losses.importance_weights(inputs["old"], inputs["rollout"], inputs["mask"], **preset)
        knobs = {**knobs, "weights": correction.weights}
        measured = losses.mismatch_metrics(inputs["old"], inputs["rollout"], inputs["mask"])
        assert measured["rollout_corr/kl"].item() == pytest.approx(vllm_kl, abs=1e-6)
    output = function(inputs["logp"], inputs["old"], inputs["adv"], inputs["mask"], **knobs)
    assert output.loss.item() == pytest.approx(loss, abs=1e-6)  # six digits are recorded
    assert output.metrics["policy/clip_fraction"].item() == pytest.approx(clip_fraction, abs=1e-6)
    assert output.metrics["policy/ppo_kl"].item() == pytest.approx(ppo_kl, abs=1e-6)
