"""What the docstrings of several losses share, written once; ``help()`` of each loss shows all of it."""

import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Loss = TypeVar("Loss", bound=Callable[..., Any])

_RAISES = {
    "Raises": "ValueError: If shapes do not fit, or an argument is unknown, out of range, missing or in conflict with "
    "another."
}

AGGREGATION_ARGUMENTS: Mapping[str, str] = {
    **_RAISES,
    "mask": "(B, T), true where a token counts. Masked entries of the other tensors may hold anything, NaN included.",
    "aggregation": "How the token losses become one number, see :func:`aggregate`.",
    "denominator": "Tokens (for ``token-mean``) or sequences of the whole optimizer step, divided by the number of "
    "micro-batches that are averaged. The count of this call when ``None``.",
    "max_length": 'Tokens, e.g. the generation limit; only for ``aggregation="constant-length"``.',
}
"""Of losses on tokens."""

POLICY_ARGUMENTS: Mapping[str, str] = {
    **AGGREGATION_ARGUMENTS,
    "logprobs": "(B, T) log-probs of the sampled tokens under the policy, with gradient; ``logprobs[:, t]`` belongs to "
    "token t + 1.",
    "old_logprobs": "(B, T) log-probs under the policy before this iteration (``logprobs.detach()`` in its first "
    "update); detached here.",
    "advantages": "(B, T), or (B, 1) or (B,) when all tokens of a sequence share one; detached here.",
    "mask": "(B, T), true where the policy chose the token and it is trained on. Masked entries of the other tensors "
    "may hold anything, NaN included.",
    "clip_low": "``ε_low`` in [0, 1]: the ratio is clipped at ``1 - ε_low``.",
    "clip_high": "``ε_high`` ≥ 0: the ratio is clipped at ``1 + ε_high``.",
    "dual_clip": "``c`` > 1, the largest ratio at a negative advantage; off by default as in OpenRLHF, 3 in verl.",
    "log_ratio_clamp": "Limit of each token's log-ratio in nats, 20 as in OpenRLHF and verl; beyond it a token has no "
    "gradient. No limit when ``None``.",
    "delta": "``δ`` ≥ 1 + ``ε_high``, upper bound of the unclipped ratio; off by default, 4 in INTELLECT-2.",
    "ratio_level": "``token``; ``sequence``: the geometric mean of the ratios of a sequence, as in :func:`gspo_loss`; "
    "``sequence-sum``: their product, as in :func:`rloo_loss`.",
    "weights": "(B, T), (B, 1) or (B,) factors of the token losses, e.g. of :func:`importance_weights`; detached here.",
    "ref_logprobs": "(B, T) log-probs under the reference policy, needed by ``kl_coef`` > 0; with 0 the KL is only "
    "measured.",
    "kl_coef": "``β`` ≥ 0, weight of the KL penalty; 0.04 in the GRPO paper, 0 in TRL and here.",
    "kl_estimator": "Estimator of :func:`kl_estimate`; ``k3`` in the GRPO paper.",
    "kl_importance_weight": "Multiply the KL by the ratio ``ρ_t``, with its gradient: unbiased off-policy, TRL's "
    "default, see :func:`kl_estimate`. Off as in the GRPO paper.",
    "kl_clamp": "Limit of each token's KL estimate in nats, before the weight, beyond which it has no gradient; off as "
    "in TRL, 10 in OpenRLHF, and in verl for ``k3``.",
}
"""Of policy losses."""

PAIR_ARGUMENTS: Mapping[str, str] = {
    **_RAISES,
    "chosen": "(B,) summed log-probs of the chosen answers under the policy, see :func:`sequence_logprobs`.",
    "rejected": "(B,) the same for the rejected answers.",
    "ref_chosen": "(B,) summed log-probs of the chosen answers under the reference model; detached here.",
    "ref_rejected": "(B,) the same for the rejected answers.",
    "chosen_lengths": "(B,) completion tokens of the chosen answers, at least 1.",
    "rejected_lengths": "(B,) the same for the rejected answers.",
    "beta": "β > 0.",
    "label_smoothing": "ε in [0, 0.5), the probability that a label is wrong.",
    "nll_coef": "Weight of the negative log-likelihood of the chosen answers, averaged over their tokens.",
    "mean_chosen_length": "Mean tokens of a chosen answer over the whole optimizer step, for the likelihood term. That "
    "of this call when ``None``, which is refused with a ``denominator``.",
    "mask": "(B,) pairs that count, all when ``None``; the other rows may hold anything.",
    "denominator": "Pairs of the whole optimizer step, divided by the number of micro-batches that are averaged. The "
    "pairs of this call when ``None``.",
}
"""Of losses on preference pairs."""

HEAD_ARGUMENTS: Mapping[str, str] = {
    "hidden": "(..., H) final hidden states; select the tokens you need first, every row costs 2·V·H operations.",
    "weight": "(V, H) of the head, or of the tied embedding.",
    "targets": "(...) int64 token ids in [0, V).",
    "bias": "(V,).",
    "temperature": "The sampling temperature, which divides the logits; 1 by default.",
    "entropy": "Also return the entropy, detached.",
    "logit_softcap": "Cap of Gemma 2's final logits; none by default.",
    "logit_scale": "Factor on the head's output (Cohere); 1 by default.",
    "chunk": "Tokens whose logits are kept at a time; chosen by their size in bytes when ``None``.",
}
"""Of functions that contain the language-model head."""

ADVANTAGE_ARGUMENTS: Mapping[str, str] = {
    **_RAISES,
    "rewards": "(B,), NaN where missing.",
    "group": "(B,) integer ids, equal for samples of one prompt.",
    "mask": "(B, T), true where the policy chose the token. Masked entries may hold anything.",
    "gamma": "``γ`` in [0, 1].",
    "kl": "(B, T) KL estimate to the reference, see :func:`kl_estimate`; detached here. Masked entries may hold "
    "anything.",
    "kl_coef": "``β`` ≥ 0; OpenRLHF's is 0.01, TRL's 0.05.",
    "scale_std": "Divide by the standard deviation; OpenRLHF's ``no_std_norm`` is false.",
    "eps": "``ε`` ≥ 0; TRL's 1e-4.",
    "truncated": "(B,) bool, true when generation stopped at the length limit.",
}
"""Of advantage estimators and reward shaping."""

_SECTION = re.compile(r"^(?:Args|Returns|Raises):$", re.MULTILINE)
_ENTRY = re.compile(r"^    (\w+): .*\n?(?:^        .*\n?)*", re.MULTILINE)


def share_arguments(shared: Mapping[str, str]) -> Callable[[Loss], Loss]:
    """Complete a function's docstring in place by shared descriptions of arguments; its own take precedence.

    Args:
        shared: Descriptions by argument; ``Raises`` is a section for functions without one.

    Raises:
        KeyError: If an argument is described in neither place.
    """

    def complete(function: Loss) -> Loss:
        if function.__doc__ is None:  # python -OO
            return function
        text = inspect.cleandoc(function.__doc__) + "\n"
        first = _SECTION.search(text)
        body = text + "\n" if first is None else text[: first.start()]
        sections = "" if first is None else text[first.start() :]
        arguments, others = "", sections
        if sections.startswith("Args:\n"):
            following = _SECTION.search(sections, 1)
            end = len(sections) if following is None else following.start()
            arguments, others = sections[len("Args:\n") : end], sections[end:]
        own = {entry[1]: entry[0].rstrip() for entry in _ENTRY.finditer(arguments)}
        described = [
            own[name] if name in own else _entry(name, shared[name]) for name in inspect.signature(function).parameters
        ]
        if "Raises" in shared and "Raises:\n" not in others:
            others = others.rstrip("\n") + ("\n\n" if others.strip() else "") + f"Raises:\n    {shared['Raises']}\n"
        function.__doc__ = body + "\n".join(["Args:", *described, "", others])
        return function

    return complete


def _entry(name: str, description: str) -> str:
    return textwrap.fill(
        f"{name}: {description}", 112, initial_indent=" " * 4, subsequent_indent=" " * 8, break_on_hyphens=False
    )
