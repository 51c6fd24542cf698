"""``OnlinePreferenceModule``: the base of modules that learn from comparisons of answers sampled during training."""

from typing import Any

from rlhfkit.data.types import Experience
from rlhfkit.modules.arguments import drop_hyperparameters, refuse_without_effect, take_out
from rlhfkit.modules.on_policy.base import ModuleStep, OnPolicyModule
from rlhfkit.parts import Part, Stage, overriding, part_name
from rlhfkit.rollout.engine import RolloutEngine
from rlhfkit.rollout.wrappers.engine_wrapper import EngineWrapper
from rlhfkit.rollout.wrappers.reference_samples import OtherSamples, ReferenceSamples
from rlhfkit.validation import check_number

OF_POLICY_LOSSES = (
    "advantages",
    "policy_loss",
    "policy_loss_arguments",
    "clip_low",
    "clip_high",
    "aggregation",
    "max_length",
    "entropy_coef",
    "correction",
    "proximal",
    "kl_coef",
    "kl_estimator",
    "kl_in_reward",
    "kl_clamp",
    "kl_importance_weight",
)
"""Arguments of :class:`OnPolicyModule` that a loss of compared answers does not have."""


class OnlinePreferenceModule(OnPolicyModule):
    """A policy with a reference model, whose loss compares whole answers and has no advantages, ratios or weights.

    Args:
        model: Folder or hub name of the policy.
        beta: β of the loss, strength of the tie to the reference.
        mask_truncated: Leave answers that the length limit cut off out of the comparison.
        **kwargs: As in :class:`OnPolicyModule`, but for those of :data:`OF_POLICY_LOSSES`.

    Raises:
        ValueError: If an argument is out of range or without effect.
    """

    def __init__(self, model: str, *, beta: float, mask_truncated: bool = False, **kwargs: Any) -> None:
        refused = take_out(OF_POLICY_LOSSES, kwargs, OnPolicyModule)
        if refused:
            raise ValueError(f"{', '.join(refused)} has no effect on a loss of pairs, which has a beta: leave it out")
        check_number("beta", beta, above=0)
        super().__init__(
            model,
            mask_truncated=mask_truncated,
            kl_coef=beta,  # there is a reference model wherever there is one for a penalty; the loss has no other
            **kwargs,
        )
        drop_hyperparameters(OF_POLICY_LOSSES, self, OnPolicyModule)
        self.beta = beta
        in_loss = [part_name(one) for one in self.parts if overriding([one], "weigh") or overriding([one], "term")]
        if in_loss:
            raise ValueError(
                f"{', '.join(in_loss)} takes part in a policy loss, and a loss of pairs has none: leave it out, or "
                "override loss()"
            )
        if mask_truncated:
            of_truncated = {name: name in self.shaping for name in ("StopProperly", "MissingEndPenalty")}
            refuse_without_effect(of_truncated, "mask_truncated, which compares no answer that was cut off")

    def mask_uncompared(self, experience: Experience) -> Experience:
        """Mask all samples that are compared with none. Abstract."""
        raise NotImplementedError

    def steps(self) -> list[Part]:
        """The steps of :class:`OnPolicyModule`, and that only compared samples are learned from."""
        return [*super().steps(), ModuleStep(self.mask_uncompared, Stage.SELECT, writes=("action_mask",))]

    @property
    def has_kl_penalty(self) -> bool:
        """Return False: ``beta`` is a constant of the loss."""
        return False

    def correct_off_policy(self) -> bool:
        """Return False: the loss has no weights of tokens, so that replayed samples are refused."""
        return False


def check_sampler(module: str, engine: RolloutEngine, needed: type[OtherSamples]) -> None:
    """Raise ValueError unless an engine, or the engine that it wraps, gives the samples that a module compares."""
    inner = engine
    while isinstance(inner, EngineWrapper) and not isinstance(inner, needed):
        inner = inner.engine
    if not isinstance(inner, needed) and not engine.recorded:
        kinds = "ReferenceSamples(engine, reference_engine)"
        kinds += "" if needed is ReferenceSamples else ", ReferenceMixture(LocalEngine())"
        raise ValueError(
            f"{module} compares an answer of the policy with one of another sampler, and {type(engine).__name__} "
            f"samples from the policy alone: give RolloutCallback(engine=...) one of {kinds}"
        )
