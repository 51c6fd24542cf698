"""What is checked of advantages before the first update of an iteration."""

from torch import Tensor

from rlhfkit.data.types import Experience
from rlhfkit.distributed import run_on_all_ranks
from rlhfkit.losses import gspo_loss, luspo_loss, rloo_loss
from rlhfkit.losses.policy.sequence import check_advantages_of_sequences
from rlhfkit.modules.on_policy.functions import PolicyLoss


def check_advantages(experience: Experience, policy_loss: PolicyLoss, source: str) -> None:
    """Check what the loss multiplies trained tokens by. A collective.

    One value that is not finite makes all weights NaN, which is seen one iteration later.

    Args:
        experience: This rank's rows.
        policy_loss: What they are given to.
        source: What computed the advantages, for the message.

    Raises:
        ValueError: If an advantage, or a log-prob that importance weights are computed from, is not finite at a token
            that is trained on (names what it was computed from that is not finite there either), or if the policy loss
            takes those of sequences and a sequence's tokens have others.
    """

    def check() -> None:
        _check_finite(experience, source)
        of_sequences = policy_loss.function in (gspo_loss, luspo_loss, rloo_loss)
        if of_sequences and experience.advantages is not None:
            check_advantages_of_sequences(experience.advantages, experience.action_mask, policy_loss.name)

    run_on_all_ranks(check, error_type=ValueError)


_INPUTS = {
    "rewards": "the reward function or its processing",
    "token_rewards": "the environment",
    "rollout_logprobs": "the engine, or a wrapper around it, which gives NaN where it knows none",
    "old_logprobs": "the policy before the iteration",
    "ref_logprobs": "the reference model",
    "teacher_logprobs": "the teacher",
    "values": "the critic",
}
"""What advantages are computed from, and where it comes from."""


def _check_finite(experience: Experience, source: str) -> None:
    """Raise ValueError for the rows of this rank, see :func:`check_advantages`."""
    mask, advantages = experience.action_mask, experience.advantages
    if advantages is not None and bool((wrong := mask & ~advantages.isfinite()).any()):
        causes = [f"{name} ({origin})" for name, origin in _INPUTS.items() if _is_wrong(experience, name, wrong)]
        raise ValueError(
            f"{source}: {_places(experience, wrong)} are not finite. "
            + (f"Neither are there: {'; '.join(causes)}" if causes else "What they are computed from is finite there")
        )
    given = experience.rollout_logprobs
    wrong = mask & given.isinf()  # NaN is a log-prob that is not known, whose weight is 1
    if bool(wrong.any()):
        places = _places(experience, wrong, "log-probs")
        raise ValueError(f"rollout_logprobs: {places} are infinite, from {_INPUTS['rollout_logprobs']}")


def _is_wrong(experience: Experience, name: str, tokens: Tensor) -> bool:
    """Whether a field of rows or tokens is not finite at some of the chosen tokens, (B, T-1)."""
    values: Tensor | None = experience.columns.get(name, getattr(experience, name, None))
    if values is None:
        return False
    finite = values.isfinite() if values.dim() == 2 else values.isfinite()[:, None]
    return bool((tokens & ~finite).any())


def _places(experience: Experience, tokens: Tensor, what: str = "advantages") -> str:
    """How many trained tokens are chosen, (B, T-1), and where the first is."""
    row = int(tokens.any(-1).int().argmax())
    prompt, sample = int(experience.group[row]), int(experience.sample_index[row])
    return (
        f"{what} of {int(tokens.sum())} of {int(experience.action_mask.sum())} trained tokens "
        f"(first: sample {sample} of prompt {prompt})"
    )
