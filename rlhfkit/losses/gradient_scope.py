"""``gradient_scope``: a mark on a loss that says which log-probs its gradient with respect to one of them depends on.

A marked loss can be trained with the gradients of the output layer computed in the forward pass (3 matrix products
instead of 4, see :mod:`rlhfkit.losses.fused_head.single_pass`), a block of tokens at a time: ``d loss / d logprob`` of
a block has to be known before the log-probs of the next one. Losses without a mark are computed as ever.
"""

from collections.abc import Callable
from typing import Any, Literal, TypeVar, get_args

GradientScope = Literal["token", "ratio", "batch"]
"""What ``d loss / d logprob_t`` (and ``d loss / d entropy_t``) depends on, besides constants.

``token``: the log-prob and entropy of the same token. ``ratio``: those differences ``log π - log π_old`` of any tokens,
which are all 0 while the old log-probs are the policy's own. ``batch``: anything in the batch.
"""

Function = TypeVar("Function", bound=Callable[..., Any])


def gradient_scope(scope: GradientScope) -> Callable[[Function], Function]:
    """Mark a loss, or the ``loss`` method of a module, with what its gradient depends on.

    The function is called more than once for one result, with log-probs of which some are not known yet: it has to be
    deterministic and without side effects.

    Example::

        @gradient_scope("token")
        def power_loss(logprobs, old_logprobs, advantages, mask, *, power=0.5):
            ...

    Raises:
        ValueError: If there is no such scope.
    """
    if scope not in get_args(GradientScope):
        raise ValueError(f"gradient_scope must be one of {', '.join(get_args(GradientScope))}, got {scope!r}")

    def mark(function: Function) -> Function:
        function.gradient_scope = scope  # type: ignore[attr-defined]  # functions take attributes
        return function

    return mark


def gradient_scope_of(function: Callable[..., Any]) -> GradientScope | None:
    """The scope that a function is marked with; ``None`` without a mark."""
    scope: GradientScope | None = getattr(function, "gradient_scope", None)
    return scope
