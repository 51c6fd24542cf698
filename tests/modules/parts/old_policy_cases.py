"""Formulas of the parts that know the policy before an iteration, by hand."""

import dataclasses
from pathlib import Path
from typing import Any

import torch
from tiny_models import tiny_mixture

from rlhfkit import GRPOModule
from rlhfkit.models import policy_output
from rlhfkit.modules.parts.routers import RouterReplay
from rlhfkit.parts import Part, Stage


def old_logprobs_formula(folder: Path) -> None:
    """Those of the policy before the iteration, of later updates only unless a part reads them, and its entropy."""
    from .cases import CASES, fit

    class Reads(Part):
        reads = ("old_logprobs", "entropy")
        stage = Stage.ADAPT

        def prepare(self, rows: Any) -> Any:
            seen.append((rows, self.module.passes.statistics(self.module.policy, rows, entropy=True)))
            return rows

    class Later(Reads):
        reads = ()

    for part, of_all in ((Later(), False), (Reads(), True)):
        seen: list[tuple[Any, Any]] = []
        fit(folder, dataclasses.replace(CASES["OldLogprobs"], data={}, trainer={}), parts=[part])  # one epoch
        assert len(seen) == 2
        for rows, expected in seen:
            chosen = rows.update >= 0 if of_all else rows.update > 0
            wanted = rows.action_mask & chosen[:, None]
            assert 0 < wanted.sum() <= rows.action_mask.sum()
            assert torch.equal(rows.old_logprobs, expected.logprobs.where(wanted, 0.0))
            assert ("entropy" in rows.columns) == of_all
            if of_all:
                assert torch.equal(rows.columns["entropy"], expected.entropy)
    kept_logprobs_formula(folder)


def kept_logprobs_formula(folder: Path) -> None:
    """In the second epoch a micro-batch's old log-probs are those that the policy gave it in the first."""
    from .cases import CASES, fit

    given: list[torch.Tensor] = []
    taken: list[torch.Tensor] = []

    class Watch(Part):
        def observe(self, batch: Any, out: Any, old: Any) -> dict[str, Any]:
            given.append(out.logprobs.detach())
            taken.append(old)
            return {}

    fit(folder, CASES["OldLogprobs"], parts=[Watch()])
    assert len(given) == 16  # two iterations of two epochs of four micro-batches
    for first in (0, 8):
        for place in range(first, first + 4):
            assert torch.equal(taken[place], given[place])
            assert torch.equal(taken[place + 4], given[place])
            assert not torch.equal(taken[place + 4], given[place + 4])


def router_replay_formula(folder: Path) -> None:
    """Replayed choices change nothing while the routers are the same, and are kept when they would choose others."""
    from .cases import batch_of

    tiny_mixture(folder / "model")
    module: Any = GRPOModule(str(folder / "model"), parts=[RouterReplay()])
    module.configure_model()
    batch = dataclasses.replace(batch_of(), input_ids=torch.arange(12).reshape(2, 6))
    with torch.no_grad():
        before = policy_output(module.policy, batch, batch.action_mask, routing=True)
        replayed = module.policy_output(batch.with_columns(routing=before.routing))
        torch.testing.assert_close(replayed.logprobs, before.logprobs)
        assert float(replayed.rerouted) == 0.0
        for name, weight in module.policy.named_parameters():
            if "gate.weight" in name:
                weight.neg_()
        others = module.policy_output(batch)
        kept = module.policy_output(batch.with_columns(routing=before.routing))
    assert float(kept.rerouted) > 0.0
    assert (kept.logprobs - others.logprobs).abs().max() > 1e-4
