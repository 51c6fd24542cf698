"""``LogLinear`` and ``RouterReplay``: what later updates of an iteration know of the policy before it."""

import torch
from torch import Tensor

from rlhfkit.data.types import Experience
from rlhfkit.losses import log_linear_proximal_logprobs
from rlhfkit.models import PolicyOutput, unwrap
from rlhfkit.models.routing import attach_routing
from rlhfkit.parts import Part, part_name


class LogLinear(Part):
    """Takes ratios to log-probs between the engine's and the policy's own, by policy versions.

    No forward pass is made for old log-probs (AReaL: Fu et al., 2025, arXiv:2505.24298), see
    :func:`~rlhfkit.losses.log_linear_proximal_logprobs`. ``GRPOModule(proximal="log-linear")`` makes one; decoupled PPO
    (arXiv:2110.00641) takes it too.

    Raises:
        ValueError: If something in the module needs the forward pass that it leaves out.
    """

    reads = ("rollout_logprobs",)

    def __init__(self) -> None:
        self.version = 0
        """Version of the policy before the iteration."""

    def attach(self, module: object) -> None:
        """Check that nothing needs old log-probs of the trainer."""
        super().attach(module)
        recording = [part_name(part) for part in self.module.parts if "routing" in part.reads]
        if recording:
            raise ValueError(
                f"{recording[0]} records which experts are chosen in the forward pass of the old log-probs, which "
                "proximal='log-linear' leaves out: give one of them"
            )
        if self.module.needs_old_logprobs:
            raise ValueError(
                "proximal='log-linear' makes no forward pass for old log-probs, which a KL penalty in the reward, "
                "KLTarget, and a teacher's log-probs compare with: use proximal='recompute'"
            )

    def prepare(self, rows: Experience) -> Experience:
        """Note the version."""
        self.version = self._now()
        return rows

    def _now(self) -> int:
        return 0 if self.module._trainer is None else int(self.module.trainer.global_step)

    def old_logprobs(self, batch: Experience, out: PolicyOutput) -> Tensor:
        """(B, T-1), the policy's own in the first update of an iteration."""
        now = self._now()
        if now == self.version:
            return out.logprobs.detach()
        return log_linear_proximal_logprobs(
            out.logprobs, batch.rollout_logprobs, batch.versions, version=now, proximal_version=self.version
        )

    def state_dict(self) -> dict[str, int]:
        """The version, for a checkpoint within an iteration."""
        return {"version": self.version}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue with it."""
        self.version = state["version"]


class RouterReplay(Part):
    """Sends each token of later updates to the experts that the policy before the iteration chose.

    Their weights are computed anew (routing replay, GSPO: Zheng et al., 2025, arXiv:2507.18071, section 5.3). For
    mixtures of experts with our packed attention; takes 2 bytes for each choice of a token's layers, and no further
    forward pass. ``policy/rerouted_fraction`` is the share of choices that would be others now.
    ``GRPOModule(router_replay=True)`` makes one.

    Raises:
        ValueError: If the policy has no routers whose choice can be replayed.
    """

    reads = ("routing",)

    @torch.no_grad()
    def loaded(self) -> None:
        """Make the policy's routers ready."""
        attach_routing(unwrap(self.module.policy))
