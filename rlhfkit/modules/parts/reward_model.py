"""``RewardModel``: scores of samples by one or several reward models, children of the module or elsewhere."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from rlhfkit.data.types import Experience
from rlhfkit.models import load_scalar_model, load_tokenizer, reward_output
from rlhfkit.modules.on_policy.forward_passes import two_tokens
from rlhfkit.parts import Child, Part, Stage
from rlhfkit.roles import ModelPool
from rlhfkit.roles.frozen_model import FrozenModel
from rlhfkit.roles.replica import Role
from rlhfkit.validation import check_number


class RewardModel(Part):
    """Adds the scores of reward models to the rewards of samples, in validation too.

    A model in the module is a frozen child, sharded or offloaded like the reference; every rank scores its share.
    :class:`~rlhfkit.rewards.ModelReward` does the same unsharded. Example::

        GRPOModule("sft", parts=[RewardModel({"helpful": "rm-a", "safe": ModelPool("rm-b")}, {"safe": 2.0})])

    A subclass overrides :meth:`build` to wrap or change a model, and :meth:`scores_of` for other scores, such as one of
    several heads.

    Args:
        models: Folder or hub name of a reward model with the policy's tokens, whose normalized score is added. A
            :class:`~rlhfkit.roles.ModelPool`: on machines of its own. A mapping: several, by name.
        weights: Factor of the score, or factors by the names of several models; 1 for those that are left out. Scores
            of several before weighting are logged as ``model/<name>``.

    Raises:
        ValueError: If an argument is out of range; when models are loaded, if a model's tokens are not the policy's.
    """

    stage, reads, writes = Stage.SCORE, ("rewards", "reward_parts"), ("rewards", "reward_parts")

    def __init__(
        self,
        models: str | ModelPool | Mapping[str, str | ModelPool | Mapping[str, Any]],
        weights: float | Mapping[str, float] = 1.0,
    ) -> None:
        several = isinstance(models, Mapping) and "class_path" not in models  # else a pool's plain form
        given: Any = models if several else {"": models}
        for name in given:
            if several and not str(name).isidentifier():
                raise ValueError(f"RewardModel({{...}}) takes names of letters, digits and _, got {name!r}")
        self.by_name: dict[str, str | ModelPool] = {name: ModelPool.of(one) for name, one in given.items()}
        """The reward models; a single one is called ``""``."""
        self.models: Any = dict(self.by_name) if several else self.by_name[""]
        chosen = dict(weights) if isinstance(weights, Mapping) else dict.fromkeys(self.by_name, weights)
        self.weights = dict(weights) if isinstance(weights, Mapping) else weights
        self.factors = dict.fromkeys(self.by_name, 1.0) | chosen
        for name, weight in self.factors.items():
            check_number(f"RewardModel.weights[{name!r}]" if name else "RewardModel.weights", weight)
        if isinstance(weights, Mapping) and (not several or {*chosen} - {*self.by_name}):
            raise ValueError(
                f"weights by name are those of RewardModel({{name: ...}}), got {chosen} for "
                f"{', '.join(self.by_name) or 'none'}: for one model give a number"
            )

    @staticmethod
    def child_of(name: str) -> str:
        """The name of a model in the module, and of its role elsewhere."""
        return f"reward_model_{name}" if name else "reward_model"

    # ------------------------------------------------------------------ building

    def children(self) -> Mapping[str, Child]:
        """The models that are not elsewhere."""
        inside = {name: one for name, one in self.by_name.items() if isinstance(one, str)}
        return {self.child_of(name): Child(partial(self.build, one)) for name, one in inside.items()}

    def placed(self) -> Mapping[str, tuple[FrozenModel, Role]]:
        """The pools."""
        pools = {name: one for name, one in self.by_name.items() if isinstance(one, ModelPool)}
        return {self.child_of(name): (one, "reward") for name, one in pools.items()}

    def build(self, name: str) -> nn.Module:
        """Load a reward model; ValueError if its tokens differ.

        What it returns is asked for normalized scores: it has to be a :class:`~rlhfkit.models.ScalarModel`, or wrap one
        (peft), as its ``normalize(rewards)`` is called on the (B,) scores.
        """
        self._check_tokens(name)
        module = self.module
        return load_scalar_model(name, new_head=False, dtype=module.model_dtype, loading=module.loading.frozen())

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        """Check the tokens of models elsewhere."""
        for one in self.by_name.values():
            if isinstance(one, ModelPool) and one.reads == "tokens":
                self._check_tokens(one.model)

    def _check_tokens(self, name: str) -> None:
        module = self.module
        tokenizer = load_tokenizer(name, trust_remote_code=module.trust_remote_code)
        if tokenizer.get_vocab() != module.tokenizer.get_vocab():
            raise ValueError(
                f"the reward model {name} has another tokenizer than the policy {module.model_name}: give the "
                "callback a ModelReward(..., text=lambda sample: ...) in place of RewardModel, or put it into a "
                "ModelPool(..., reads='chat')"
            )

    # ------------------------------------------------------------------ scores

    def scores_of(self, model: nn.Module, batch: Experience) -> Tensor:
        """(b,) scores of a batch by a model in the module; override it to read another output."""
        return reward_output(model, batch, normalized=True)

    def parts_of(self, rows: Experience | None) -> dict[str, Tensor]:
        """(B,) float32 of own rows, on the CPU: the weighted sum, as ``model``, and of several each. A collective.

        ``None``: this rank has no rows, and only takes part in the forward passes of the others; the results are (0,).
        """
        scores = self._scores_by_name(rows)
        total = torch.zeros(0 if rows is None else len(rows))
        for name, weight in self.factors.items():
            total = total + weight * scores[name]
        apart = {} if "" in scores else {f"model/{name}": score for name, score in scores.items()}
        return {"model": total} | apart

    def _scores_by_name(self, rows: Experience | None) -> dict[str, Tensor]:
        """(B,) scores by each model; those elsewhere work while the children do."""
        elsewhere = [name for name, one in self.by_name.items() if isinstance(one, ModelPool)]
        for name in elsewhere:
            self.module.placed.ask(self.child_of(name), rows)
        inside = [name for name in self.by_name if name not in elsewhere]
        scores = {name: self._scores_of_child(getattr(self.module, self.child_of(name)), rows) for name in inside}
        return scores | {name: self.module.placed.result(self.child_of(name), 1)[:, 0] for name in elsewhere}

    def _scores_of_child(self, child: nn.Module, rows: Experience | None) -> Tensor:
        forward: Callable[..., Tensor] = self.module.passes.forward

        def scores(batch: Experience) -> Tensor:
            return self.scores_of(child, batch)[:, None]

        if rows is None:
            return forward(child, scores, two_tokens(), torch.tensor([False]))[:0, 0]
        return forward(child, scores, rows)[:, 0]

    def prepare(self, rows: Experience) -> Experience:
        """Add the scores to the rewards and, as ``model``, to their parts, unless they are there already."""
        summary = rows.iteration  # the same on every rank, which the parts of own rows need not be
        if "model" in (rows.reward_parts if summary is None else summary.reward_parts):
            return rows
        found, gather = self.parts_of(rows), self.module.ranks.gather_rows
        rewards, parts = rows.rewards + found["model"], {**rows.reward_parts, **found}
        if summary is not None:
            gathered = {name: gather(rows, score) for name, score in found.items()}
            everyone = {**summary.reward_parts, **gathered}
            summary = dataclasses.replace(summary, rewards=gather(rows, rewards), reward_parts=everyone)
        return dataclasses.replace(rows, rewards=rewards, reward_parts=parts, iteration=summary)
