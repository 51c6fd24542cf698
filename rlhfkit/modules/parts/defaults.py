"""Parts that a module which learns from its own samples has without being given them.

A part among ``parts=`` of the same class, or that writes the same fields, takes the place of one of them.
"""

from typing import Any

from rlhfkit.modules.parts.advantages import AdvantagesBy, OverriddenAdvantages
from rlhfkit.modules.parts.correction import Correction, EngineMismatch, NoCorrection
from rlhfkit.modules.parts.old_policy import OldLogprobs
from rlhfkit.parts import Part
from rlhfkit.validation import refuse_without_effect


def credit_parts(module: Any) -> list[Part]:
    """What computes the advantages of a module: what its class has set, else the function that it was given.

    Nothing if a part among ``parts=`` writes them by itself.

    Raises:
        ValueError: If one does beside a function.
    """
    given = module.advantage_function
    own: list[Part] = vars(module).get("credit", [] if given is None else [AdvantagesBy(given)])
    others = [part for part in module.given_parts if "advantages" in part.creates]
    if others:
        refuse_without_effect({"advantages": given is not None}, f"{others[0]!r} among parts")
    own = module.in_place(own)
    return own if all(part in own for part in others) else []


def default_parts(module: Any) -> list[Part]:
    """What every module has; first what calls its ``advantages()``, if its class overrides that."""
    return [*([OverriddenAdvantages()] if module.overrides_advantages else []), OldLogprobs(), EngineMismatch()]


def add_correction(module: Any) -> bool:
    """Add what is needed when samples are of another policy than the one that learns: truncated importance sampling.

    Nothing if a :class:`Correction` or :class:`NoCorrection` was given, or the policy loss is not used, takes no
    weights, or accounts for the engine's log-probs itself. Returns whether it was added.
    """
    loss, given = module.policy_loss, any(isinstance(part, Correction | NoCorrection) for part in module.parts)
    used = loss.takes("weights") and any("advantages" in part.writes for part in module.parts)
    needed = used and not given and not loss.takes("rollout_logprobs")
    if needed:
        module.add_part(Correction("tis"))
    return bool(needed)
