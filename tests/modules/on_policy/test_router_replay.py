"""Later updates of an iteration send tokens to the experts that the policy before it chose."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from rl_runs import fit_run
from tiny_models import tiny_mixture, tiny_model

from rlhfkit import GRPOModule
from rlhfkit.models import policy_output
from rlhfkit.models.forward import unwrap
from rlhfkit.models.routing import attach_routing
from rlhfkit.modules.parts.routers import RouterReplay


class Spy(GRPOModule):
    """Keeps the policy before each iteration, and what the updates of the last one have used."""

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


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, tuple[Spy, dict[str, float]]]:
    found = {}
    for replays in (False, True):
        folder = tmp_path_factory.mktemp("run")
        tiny_mixture(folder / "model")
        trainer, module, _ = fit_run(
            folder, module=Spy, module_arguments={"lr": 0.05, "parts": [RouterReplay()] * replays}, max_epochs=1
        )
        found[replays] = (module, {name: float(value) for name, value in trainer.callback_metrics.items()})
    return found  # type: ignore[return-value]


def test_later_updates_have_the_choices_of_the_policy_before_the_iteration(runs: dict[bool, Any]) -> None:
    module, metrics = runs[True]
    later = [(batch, before) for batch, before, _ in module.used if int(batch.update[0]) > 0]
    assert later
    for batch, before in later:
        real = batch.attention_mask[:, 1:]
        assert torch.equal(batch.columns["routing"][real], before.routing[real])
        torch.testing.assert_close(
            batch.old_logprobs[batch.action_mask], before.logprobs[batch.action_mask], atol=1e-5, rtol=0.0
        )
    assert 0.0 < metrics["policy/rerouted_fraction"] < 1.0


def test_the_first_update_is_that_of_a_run_without(runs: dict[bool, Any]) -> None:
    (plain, _), (replaying, _) = runs[False], runs[True]
    firsts = [[out for batch, _, out in each.used if int(batch.update[0]) == 0] for each in (plain, replaying)]
    for without, with_replay in zip(*firsts, strict=True):
        assert torch.equal(without.logprobs, with_replay.logprobs)
    assert all("routing" not in batch.columns for batch, _, _ in plain.used)


def test_a_dense_model_is_refused(tmp_path: Path) -> None:
    tiny_model(tmp_path / "model")
    with pytest.raises(ValueError, match="has no routers whose choice can be replayed"):
        GRPOModule(str(tmp_path / "model"), parts=[RouterReplay()]).configure_model()
