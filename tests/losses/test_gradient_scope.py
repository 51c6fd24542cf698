"""What the marks of losses say of their gradients, measured on random log-probs."""

import pytest
import torch

import rlhfkit.losses
from rlhfkit.losses import gradient_scope
from rlhfkit.losses.gradient_scope import gradient_scope_of

from .policy.test_properties import LOSSES, public_losses
from .policy_cases import gradient, policy_batch

SCOPES = {name: gradient_scope_of(loss) for name, loss in public_losses().items()}


def with_scope(scope: str) -> list[str]:
    return [name for name in LOSSES if SCOPES.get(name) == scope]


def test_all_policy_losses_are_marked_except_one_that_draws_random_numbers() -> None:
    assert [name for name, scope in SCOPES.items() if scope is None] == ["clip_cov"]


def gradients_with_other_tokens_changed(name: str, *, first_update: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of every second token, before and after the log-probs of the others are changed."""
    batch = policy_batch(3)
    kept = torch.arange(batch.mask.numel()).view(batch.mask.shape) % 2 == 0
    found = []
    for logprobs in (batch.logprobs, torch.where(kept, batch.logprobs, 0.0)):
        leaf = logprobs.clone().requires_grad_()
        old = leaf.detach() if first_update else batch.old_logprobs
        loss = LOSSES[name](leaf, old, batch.advantages, batch.mask).loss
        found.append(gradient(loss, leaf)[kept])
    return found[0], found[1]


@pytest.mark.parametrize("first_update", [False, True])
@pytest.mark.parametrize("name", with_scope("token"))
def test_gradients_of_scope_token_do_not_depend_on_other_tokens(name: str, first_update: bool) -> None:
    before, after = gradients_with_other_tokens_changed(name, first_update=first_update)
    assert torch.equal(before, after)
    assert before.any()


@pytest.mark.parametrize("name", with_scope("ratio"))
def test_gradients_of_scope_ratio_do_so_only_in_later_updates(name: str) -> None:
    before, after = gradients_with_other_tokens_changed(name, first_update=True)
    assert torch.equal(before, after)
    assert not torch.equal(*gradients_with_other_tokens_changed(name, first_update=False))


def test_a_mark_is_one_of_three() -> None:
    with pytest.raises(ValueError, match="must be one of token, ratio, batch, got 'row'"):
        gradient_scope("row")  # type: ignore[arg-type]
    assert rlhfkit.losses.gradient_scope is gradient_scope
    assert gradient_scope_of(len) is None
