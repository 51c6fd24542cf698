"""``ComparedOutput``: the policy's output for a batch, and how far it is from a teacher's."""

from typing import Self

from torch import Tensor

from rlhfkit.models import PolicyOutput


class ComparedOutput(PolicyOutput):
    """The policy's output for a batch, with its divergence from a teacher's.

    A named tuple takes no further fields, so these are attributes, which ``_replace`` does not keep.
    """

    divergence: Tensor
    """(B, T-1) float32 in nats, with gradient; 0 where the mask is false."""

    @classmethod
    def of(
        cls,
        logprobs: Tensor,
        entropy: Tensor | None,
        divergence: Tensor,
        router_aux_loss: Tensor | None,
    ) -> Self:
        """Make an output of tensors (B, T-1) and the router's loss, a scalar."""
        made = cls(logprobs, entropy, router_aux_loss)
        made.divergence = divergence
        return made
