"""Later updates of an iteration send tokens to the experts that the policy before it chose."""

import copy
from pathlib import Path
from typing import Any

import torch
from rl_runs import fit_run
from tiny_models import tiny_mixture

from rlhfkit import GRPOModule
from rlhfkit.models import policy_output
from rlhfkit.models.forward import unwrap
from rlhfkit.models.routing import attach_routing
from rlhfkit.modules.parts.routers import RouterReplay


class Spy(GRPOModule):
    """Keeps what the updates of the last iteration have used, and what the policy before it says of the same."""

    def prepare(self, experience: Any) -> Any:
        self.before = copy.deepcopy(unwrap(self.policy)).eval()
        attach_routing(self.before)
        self.used: list[Any] = []
        return super().prepare(experience)

    def policy_output(self, batch: Any) -> Any:
        out = super().policy_output(batch)
        with torch.no_grad():
            before = policy_output(self.before, batch, batch.action_mask, temperature=batch.temperature, routing=True)
        self.used.append((batch, before, out))
        return out


def test_later_updates_have_the_choices_of_the_policy_before_the_iteration_and_the_first_is_free(
    tmp_path: Path,
) -> None:
    tiny_mixture(tmp_path / "model")
    arguments = {"lr": 0.05, "parts": [RouterReplay()]}
    trainer, module, _ = fit_run(tmp_path, module=Spy, module_arguments=arguments, max_epochs=1)
    assert {int(batch.update[0]) for batch, _, _ in module.used} == {0, 1}
    for batch, before, out in module.used:
        chosen, mask = batch.attention_mask[:, 1:], batch.action_mask
        if int(batch.update[0]) == 0:
            torch.testing.assert_close(out.logprobs[mask], before.logprobs[mask])
        else:
            assert torch.equal(batch.columns["routing"][chosen], before.routing[chosen])
            torch.testing.assert_close(batch.old_logprobs[mask], before.logprobs[mask], atol=1e-5, rtol=0.0)
    assert 0.0 < trainer.callback_metrics["policy/rerouted_fraction"] < 1.0
