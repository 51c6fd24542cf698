"""Covers ``mesh.py``: who computes with whom, and runs of ranks that share forward passes beside one rank's."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from rl_runs import RANK, RANKS, Iterations, PlainGRPO, digits, fit_run
from strategies import ranks
from tiny_models import tiny_model

from rlhfkit import Invariants, ModelLoading, RolloutCallback, SamplingSpec, SFTDataModule
from rlhfkit.distributed import gather_objects
from rlhfkit.mesh import Mesh, forward_group_of
from rlhfkit.models import load_causal_lm
from rlhfkit.models.forward import unwrap
from rlhfkit.modules.parts import MovingReference
from rlhfkit.rollout import ModuleWeights
from rlhfkit.strategies import RLHFDeepSpeedStrategy

CAP = 12
"""Tokens that each of two sequence ranks may compute: fewer than the longest rows have."""


def test_every_rank_is_in_one_group_of_each_kind_at_its_place() -> None:
    for rank in range(12):
        mesh = Mesh(rank, 12, sequence=3, tensor=2)
        assert (mesh.data_rank, mesh.sequence_rank, mesh.tensor_rank) == (rank // 6, rank % 6 // 2, rank % 2)
        assert mesh.forward_groups()[mesh.data_rank][mesh.member] == rank
        assert [ranks.index(rank) for ranks in mesh.sequence_groups() if rank in ranks] == [mesh.sequence_rank]
        assert [ranks.index(rank) for ranks in mesh.tensor_groups() if rank in ranks] == [mesh.tensor_rank]
    assert Mesh(0, 12, sequence=3, tensor=2).tensor_groups()[:2] == [[0, 1], [2, 3]]
    assert Mesh(0, 12, sequence=3, tensor=2).sequence_groups()[:2] == [[0, 2, 4], [1, 3, 5]]


def test_sequence_ranks_may_compute_as_many_tokens_each_and_tensor_ranks_together() -> None:
    data = SFTDataModule("none.jsonl", max_tokens_per_micro_batch=CAP)
    for sizes, limit in (({"sequence_parallel_size": 2}, 2 * CAP), ({"tensor_parallel_size": 2}, CAP)):
        data.trainer = L.Trainer(strategy=RLHFDeepSpeedStrategy(**sizes), accelerator="cpu", devices=4, logger=False)
        assert data.max_tokens_of_forward == limit


class Seen(Iterations):
    """What was sampled, this rank's tokens of micro-batches and of turns, and whole weights; may save checkpoints."""

    def __init__(self, folder: Path | None) -> None:
        super().__init__()
        self.folder = folder
        self.sizes: list[int] = []
        self.turns: list[int] = []
        self.ends: dict[str, torch.Tensor] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.sizes.append(int(batch.attention_mask.sum()))
        inside = self.began[-1:] == [trainer.global_step]  # an accumulation window
        if self.folder and trainer.current_epoch == 2 and inside:
            trainer.save_checkpoint(self.folder / "inside.ckpt")

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self.folder:
            trainer.save_checkpoint(self.folder / f"{trainer.current_epoch}.ckpt")
        rollouts = RolloutCallback.of(trainer)
        if rollouts.inside_collected_iteration:
            super().on_train_epoch_end(trainer, pl_module)
            rows = pl_module.passes.turns(pl_module.policy, rollouts.experience, None)
            self.turns = [0 if one is None else int(rollouts.experience.lengths[one].sum()) for one in rows]

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        group = forward_group_of(unwrap(pl_module.policy))
        sizes = [getattr(trainer.strategy, f"{kind}_parallel_size", 1) for kind in ("sequence", "tensor")]
        assert sizes[0] * sizes[1] == (1 if group is None else group.mesh.forward_group_size)
        for child in ("policy", "reference"):
            weights = ModuleWeights(getattr(pl_module, child))
            self.ends |= {f"{child}.{name}": tensor.detach().clone() for name, tensor in weights}


def fit(
    folder: Path, model: str, strategy: Any = "auto", resume: Path | None = None, epochs: int = 3, saves: bool = False
) -> Any:
    """Iterations of 8 rows in two updates, and of as many micro-batches as need be where there are several ranks."""
    os.environ["WORLD_SIZE"] = str(RANKS)  # Lightning deletes it when a fit ends
    sequence = getattr(strategy, "sequence_parallel_size", 1)
    size: dict[str, Any] = {"micro_batch_size": 2}
    if RANKS > 1:
        size = {"micro_batch_size": None, "max_tokens_per_micro_batch": 2 * CAP // sequence, "updates_per_iteration": 2}
    reference = MovingReference(steps=2, alpha=0.25)  # sharded and divided like the policy
    loading = ModelLoading(max_tokens_per_forward=CAP)
    trainer, _, _ = fit_run(
        folder / f"rank{RANK}",
        model=Path(model),
        module=PlainGRPO,
        module_arguments={"lr": 0.05, "kl_coef": 0.01, "loading": loading, "parts": [reference]},
        data_arguments={"rollout_batch_size": 2} | size,
        rollouts=RolloutCallback(digits, sampling=SamplingSpec(group_size=4, max_new_tokens=12, min_new_tokens=1)),
        callbacks=[Invariants(), seen := Seen(folder if saves else None)],
        strategy=strategy,
        devices=RANKS,
        max_epochs=epochs,
        accumulate_grad_batches=2 if RANKS == 1 else 1,
        use_distributed_sampler=False,
        resume=resume,
    )
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if "time/" not in name}
    return seen, {"steps": trainer.global_step, "metrics": metrics}


WAYS: list[tuple[int, dict[str, Any]]] = [
    (3, {"sequence_parallel_size": 2}),
    (2, {"sequence_parallel_size": 4, "sequence_parallel": "ring"}),
    (2, {"tensor_parallel_size": 2}),
]
"""ZeRO stages, and how four ranks share forward passes."""


def share(folder: Path, model: str) -> None:
    """A rank of four: trains as one rank does, and where two divide sequences goes on as if it were not stopped."""
    ends, tokens, expected = torch.load(folder.parent / "alone.pt")

    def check(seen: Seen) -> None:
        assert seen.ends.keys() == ends.keys()
        for name, tensor in seen.ends.items():
            torch.testing.assert_close(tensor, ends[name], rtol=1e-5, atol=1e-5, msg=name)

    for number, (stage, sizes) in enumerate(WAYS):
        seen, found = fit(folder / str(number), model, RLHFDeepSpeedStrategy(stage, **sizes), saves=number == 0)
        assert found["steps"] == expected["steps"]
        assert seen.tokens == tokens
        for name, value in expected["metrics"].items():
            assert found["metrics"][name] == pytest.approx(value, rel=1e-4, abs=2e-6), name
        check(seen)
        if number == 0:
            resume(folder, model, seen, check)


def resume(folder: Path, model: str, seen: Seen, check: Callable[[Seen], None]) -> None:
    """Goes on from inside an accumulation window, and after an epoch without groups."""
    stage, sizes = WAYS[0]

    def strategy() -> RLHFDeepSpeedStrategy:
        return RLHFDeepSpeedStrategy(stage, **sizes)

    saved = folder / "0"
    rest, _ = fit(folder / "rest", model, strategy(), resume=saved / "inside.ckpt")
    assert all(torch.equal(rest.ends[name], tensor) for name, tensor in seen.ends.items())
    assert 0 < len(rest.sizes) < len(seen.sizes)
    assert rest.sizes == seen.sizes[-len(rest.sizes) :]
    # The second epoch is run without groups, and the third with them again.
    fit(folder / "without", model, RLHFDeepSpeedStrategy(stage), resume=saved / "0.ckpt", epochs=2, saves=True)
    check(fit(folder / "with", model, strategy(), resume=folder / "without/1.ckpt")[0])
    # Rows above a rank's share are divided, in turns where log-probs are computed.
    shares, turns = gather_objects(seen.sizes), gather_objects(seen.turns)
    assert max(map(max, shares)) > CAP
    assert max(map(max, turns)) > CAP
    for first in (0, 2):
        fillers = 2  # tokens, where one of the two ranks has no rows
        assert max(map(sum, zip(*shares[first : first + 2], strict=True))) <= 2 * CAP + fillers
        assert all(not (one and other) for one, other in zip(*turns[first : first + 2], strict=True))


@pytest.mark.distributed
def test_four_ranks_that_share_forward_passes_train_as_one(tmp_path: Path) -> None:
    model = str(tiny_model(tmp_path / "model", key_heads=2))  # two tensor ranks have one key head each
    alone, found = fit(tmp_path / "alone", model)
    torch.save((alone.ends, alone.tokens, found), tmp_path / "alone.pt")
    reference = alone.ends["reference.model.embed_tokens.weight"]
    start, end = load_causal_lm(model).get_input_embeddings().weight, alone.ends["policy.model.embed_tokens.weight"]
    assert all(float((reference - other).detach().abs().max()) > 1e-4 for other in (start, end)), (
        "it has moved half way"
    )
    ranks.run(share, 4, tmp_path / "four", model=model)
