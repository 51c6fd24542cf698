"""Models elsewhere are asked group by group, here one of a user's own in this process; test_model_pool.py has pools.

Covers reward_models.py too.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rl_runs import PlainGRPO, digits, setup_run, weights
from tiny_models import tiny_model
from torch import Tensor

from rlhfkit import DynamicSampling, Experience, RolloutCallback, SamplingSpec
from rlhfkit.models import load_causal_lm, policy_output
from rlhfkit.roles.replicas.early_rows import EarlyRows


class Here:
    """A frozen model elsewhere that is here; it counts how often it was asked, and what it was asked for."""

    def __init__(self, model: str) -> None:
        self.model, self.version, self.waited, self.hidden = model, 0, 0.0, 0.0
        self.early, self.sizes, self.started = EarlyRows(), list[int](), False

    def plain(self) -> dict[str, Any]:
        return {"model": self.model, "urls": "http://nobody"}

    def start(self, role: str, **_: Any) -> None:
        if not self.started:
            self.started, self._model = True, load_causal_lm(self.model).eval()

    def take_seconds(self) -> tuple[float, float]:
        return 1.0, 2.0

    def refresh(self) -> None: ...

    def close(self) -> None: ...

    def submit(self, experience: Experience, batches: Sequence[Tensor]) -> "Here.Done":
        self.sizes.append(sum(map(len, batches)))
        with torch.no_grad():
            part = policy_output(self._model, experience, experience.action_mask).logprobs
        return self.Done(part)

    class Done:
        def __init__(self, values: Tensor) -> None:
            self._values = values

        def result(self, columns: int | None = None) -> Tensor:
            return self._values


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_each_group_is_asked_about_when_it_is_finished_and_the_numbers_are_the_childs(
    tmp_path: Path, max_staleness: int
) -> None:
    model = str(tiny_model(tmp_path / "model"))
    found = []
    for elsewhere in (None, Here(model)):
        rollouts = RolloutCallback(
            digits,
            sampling=SamplingSpec(group_size=4, max_new_tokens=8),
            dynamic_sampling=DynamicSampling(by=lambda sample: float(sample.num_tokens)),  # so that groups stream
            max_staleness=max_staleness,
        )
        arguments: dict[str, Any] = {"lr": 0.05, "kl_coef": 0.1, "reference": elsewhere}
        trainer, module, data, _ = setup_run(tmp_path, module=PlainGRPO, module_arguments=arguments, rollouts=rollouts)
        trainer.fit(module, datamodule=data)
        found.append(weights(module))
    assert elsewhere is not None
    assert set(elsewhere.sizes) == {4}  # a group each time, and nothing was asked for again
    assert len(elsewhere.sizes) >= 2 * 8
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=0, atol=1e-6)
    assert float(trainer.callback_metrics["time/reference_waited"]) == 1.0
    assert float(trainer.callback_metrics["time/reference_hidden"]) == 2.0
