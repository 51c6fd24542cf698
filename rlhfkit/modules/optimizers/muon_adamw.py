"""``Muon``: torch's Muon for matrices and AdamW for everything else, in one optimizer."""

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch.optim import Optimizer


class Muon(Optimizer):
    """Muon (Jordan et al., 2024, kellerjordan.github.io/posts/muon) for groups with ``"kind": "matrices"``, else AdamW.

    Both are torch's own, over the same groups and states as this optimizer, so that one schedule, one checkpoint and
    one Lightning optimizer hold both. By default Muon's updates have the root mean square of AdamW's (``0.2
    sqrt(max(A, B))``), so that the learning rates and decays of AdamW fit both (Liu et al., 2025, arXiv:2502.16982).

    Muon's step depends on whole matrices: this optimizer must not be given parts of them.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        eps: float = 1e-8,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr: str = "match_rms_adamw",
        fused: bool | None = None,
    ) -> None:
        """Sort the groups.

        Args:
            groups: Parameter groups; those with ``"kind": "matrices"`` hold whole matrices.
            lr: Learning rate of both.
            betas: AdamW's averaging factors.
            weight_decay: Decoupled weight decay of both.
            eps: AdamW's.
            momentum: Muon's.
            nesterov: Whether Muon's momentum is Nesterov's.
            ns_steps: Muon's Newton-Schulz iterations.
            adjust_lr: Factor of the learning rate by the shape of a matrix: ``"match_rms_adamw"``, or ``"original"``,
                ``sqrt(max(1, A / B))``.
            fused: Whether AdamW takes torch's fused kernels.

        Raises:
            ValueError: If an argument is out of range, or a matrix has not two dimensions.
        """
        placeholder = torch.nn.Parameter(torch.zeros(1, 1))
        self._adamw = torch.optim.AdamW(
            [placeholder], lr=lr, betas=betas, weight_decay=weight_decay, eps=eps, fused=fused
        )
        self._muon = torch.optim.Muon(
            [placeholder],
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            nesterov=nesterov,
            ns_steps=ns_steps,
            adjust_lr_fn=adjust_lr,
        )
        # A group has the settings of its own algorithm; both have lr, weight_decay and eps.
        of = {True: self._muon.defaults, False: self._adamw.defaults}
        super().__init__([{**of[_is_matrices(group)], **group} for group in groups], {"lr": lr})
        self._require_whole()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the groups of both."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._require_whole()
        for part, matrices in ((self._muon, True), (self._adamw, False)):
            # Loading a state, and DeepSpeed, replace both.
            part.param_groups = [group for group in self.param_groups if _is_matrices(group) is matrices]
            part.state = self.state
            if part.param_groups:
                cast(Any, part).step()  # torch 2.13 does not type Muon's
        return loss

    def _require_whole(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if _is_matrices(group) and parameter.ndim != 2:
                    raise ValueError(
                        f"Muon updates whole matrices and was given a tensor of shape {tuple(parameter.shape)}: the "
                        "strategy flattens or divides weights (ZeRO stages 1 to 3, 16-bit engines at stage 0). Train "
                        "with Trainer(strategy='ddp') or ZeRO stage 0 in float32, or take optimizer='adamw'"
                    )


def _is_matrices(group: dict[str, Any]) -> bool:
    return group.get("kind") == "matrices"
