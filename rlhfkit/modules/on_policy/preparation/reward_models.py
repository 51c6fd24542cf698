"""``ScoredModule``: a policy whose samples one or several reward models score, children of the module or elsewhere."""

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from rlhfkit.data.types import Experience
from rlhfkit.models import load_scalar_model, load_tokenizer, reward_output
from rlhfkit.modules.base import PolicyModule, freeze
from rlhfkit.modules.on_policy.preparation.iteration import two_tokens
from rlhfkit.modules.on_policy.preparation.placed_models import AskedRows, PlacedModule, ask, pool_result
from rlhfkit.roles import FrozenModel, ModelPool
from rlhfkit.roles.replica import Role
from rlhfkit.validation import check_number


class ScoredModule(PlacedModule):
    """A policy whose samples are scored by reward models.

    Example::

        GRPOModule("sft", reward_model={"helpful": "rm-a", "safe": ModelPool("rm-b")}, reward_weights={"safe": 2.0})

    Args:
        model: Folder or hub name of the policy.
        reward_model: Folder or hub name of a reward model with the policy's tokens, whose normalized score is added to
            the callback's reward, in validation too. It is a frozen child, sharded or offloaded like the reference;
            every rank scores its share. :class:`~rlhfkit.rewards.ModelReward` does the same unsharded. A
            :class:`~rlhfkit.roles.ModelPool`: on machines of its own. A mapping: several, by name.
        reward_weights: Factors of the scores of several reward models, by name; 1 for those that are left out. Scores
            before weighting are logged as ``model/<name>``.
        **kwargs: See :class:`~rlhfkit.modules.on_policy.preparation.iteration.IterationModule`.

    Raises:
        ValueError: If an argument is out of range; when they are loaded, if a model's tokens are not the policy's.
    """

    reward_model: nn.Module
    frozen_children: tuple[str, ...] = (*PolicyModule.frozen_children, "reward_model")

    def __init__(
        self,
        model: str,
        *,
        reward_model: str | ModelPool | Mapping[str, str | ModelPool] | None = None,
        reward_weights: Mapping[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, **kwargs)
        several = isinstance(reward_model, Mapping) and "num_replicas" not in reward_model  # else a pool's plain form
        given: Any = reward_model if several else {} if reward_model is None else {"": reward_model}
        for name in given:
            if several and not str(name).isidentifier():
                raise ValueError(f"reward_model={{...}} takes names of letters, digits and _, got {name!r}")
        self.reward_models: dict[str, str | ModelPool] = {
            name: one if isinstance(one, str) else cast(ModelPool, ModelPool.of(one)) for name, one in given.items()
        }
        """The reward models, by name; a single one is called ``""``."""
        self._last_scores: dict[str, Tensor] = {}
        self.reward_weights = dict.fromkeys(self.reward_models, 1.0) | dict(reward_weights or {})
        for name, weight in self.reward_weights.items():
            check_number(f"reward_weights[{name!r}]", weight)
        unknown = set(self.reward_weights) - set(self.reward_models)
        if unknown or (reward_weights and not several):
            raise ValueError(
                f"reward_weights are those of reward_model={{name: ...}}, got {dict(reward_weights or {})} for "
                f"{', '.join(self.reward_models) or 'none'}"
            )
        if several:
            self.frozen_children = (*type(self).frozen_children, *map(self._child, self.reward_models))
        pools = {name: one.plain() for name, one in self.reward_models.items() if isinstance(one, ModelPool)}
        if pools:
            self.hparams.update(reward_model=dict(self.reward_models) | pools if several else pools[""])

    @staticmethod
    def _child(name: str) -> str:
        return f"reward_model_{name}" if name else "reward_model"

    @property
    def reward_pool(self) -> ModelPool | None:
        """The replicas of the single reward model; ``None``: it is a child, or there are none or several."""
        one = self.reward_models.get("")
        return one if isinstance(one, ModelPool) else None

    @property
    def reward_model_name(self) -> str | None:
        """Folder or hub name of the first reward model; ``None``: there is none."""
        first = next(iter(self.reward_models.values()), None)
        return first.model if isinstance(first, ModelPool) else first

    def placed_models(self) -> dict[str, tuple[FrozenModel, Role]]:
        """The models on machines of their own, by the name of the role, and what they are asked for."""
        return {
            self._child(name): (one, "reward") for name, one in self.reward_models.items() if isinstance(one, ModelPool)
        }

    # ------------------------------------------------------------------ building

    @property
    def needs_reward(self) -> bool:
        """Whether ``RolloutCallback`` must have a reward."""
        return not self.reward_models

    def configure_model(self) -> None:
        """Build the policy and the reward models."""
        super().configure_model()
        for name, one in self.reward_models.items():
            if isinstance(one, ModelPool):
                if one.reads == "tokens":
                    self._check_tokens(one.model)
            elif not hasattr(self, self._child(name)):
                setattr(self, self._child(name), self._load_reward_model(one) if name else self.build_reward_model())

    def build_reward_model(self) -> nn.Module:
        """Load a single reward model, frozen; ValueError if its tokens differ. Override to wrap or change it.

        What it returns is asked for normalized scores: it has to be a :class:`~rlhfkit.models.ScalarModel`, or wrap one
        (peft), as its ``normalize(rewards)`` is called on the (B,) scores.
        """
        assert self.reward_model_name is not None
        return self._load_reward_model(self.reward_model_name)

    def _load_reward_model(self, name: str) -> nn.Module:
        self._check_tokens(name)
        model = load_scalar_model(
            name,
            new_head=False,
            dtype=self.model_dtype,
            attention=self.attention,
            trust_remote_code=self.trust_remote_code,
        )
        return freeze(model)

    def _check_tokens(self, name: str) -> None:
        tokenizer = load_tokenizer(name, trust_remote_code=self.trust_remote_code)
        if tokenizer.get_vocab() != self.tokenizer.get_vocab():
            raise ValueError(
                f"the reward model {name} has another tokenizer than the policy {self.model_name}: give the "
                "callback a ModelReward(..., text=lambda sample: ...) in place of reward_model, or put it into a "
                "ModelPool(..., reads='chat')"
            )

    # ------------------------------------------------------------------ scores

    @property
    def scores_samples(self) -> bool:
        """Whether there is a reward model, whose scores ``RolloutCallback`` adds to the rewards of samples."""
        return bool(self.reward_models)

    def reward_model_scores(self, experience: Experience | None) -> Tensor:
        """(B,) float32 weighted sum of normalized scores of this rank's rows, on the CPU. A collective.

        ``None``: this rank has no rows, and only takes part in the forward passes of the others; the result is (0,).
        """
        scores = self._scores_by_name(experience)
        total = torch.zeros(0 if experience is None else len(experience))
        for name, weight in self.reward_weights.items():
            total = total + weight * scores[name]
        self._last_scores = scores
        return total

    def reward_model_parts(self, experience: Experience | None) -> dict[str, Tensor]:
        """The sum, as ``model``, and with several reward models each score, as ``model/<name>``. A collective."""
        total = self.reward_model_scores(experience)
        if "" in self.reward_models:
            return {"model": total}
        return {"model": total} | {f"model/{name}": score for name, score in self._last_scores.items()}

    def _scores_by_name(self, experience: Experience | None) -> dict[str, Tensor]:
        """(B,) scores by each model; those elsewhere work while the children do."""
        asked: dict[str, tuple[ModelPool, AskedRows]] = {}
        for name, one in self.reward_models.items():
            if isinstance(one, ModelPool):
                asked[name] = one, ask(one, "reward", self, experience)
        scores = {}
        for name in self.reward_models:
            if name not in asked:
                scores[name] = self._scores_of_child(getattr(self, self._child(name)), experience)
        for name, (pool, rows) in asked.items():
            scores[name] = pool_result(rows, pool, columns=1)[:, 0]
        return scores

    def _scores_of_child(self, child: nn.Module, experience: Experience | None) -> Tensor:
        def scores(batch: Experience) -> Tensor:
            return reward_output(child, batch, normalized=True)[:, None]

        if experience is None:
            return self.distributed_forward(child, scores, two_tokens(), torch.tensor([False]))[:0, 0]
        return self.distributed_forward(child, scores, experience)[:, 0]

    def add_reward_model_scores(self, experience: Experience) -> Experience:
        """Add the reward models' scores to the rewards and, as ``model``, to their parts, if missing. A collective."""
        summary = experience.iteration  # the same on every rank, which the parts of own rows need not be
        known = experience.reward_parts if summary is None else summary.reward_parts
        if not self.scores_samples or "model" in known:
            return experience
        found = self.reward_model_parts(experience)
        rewards, parts = experience.rewards + found["model"], {**experience.reward_parts, **found}
        if summary is not None:
            gathered = {name: self.gather_rows(experience, score) for name, score in found.items()}
            everyone = {**summary.reward_parts, **gathered}
            summary = dataclasses.replace(summary, rewards=self.gather_rows(experience, rewards), reward_parts=everyone)
        return dataclasses.replace(experience, rewards=rewards, reward_parts=parts, iteration=summary)
