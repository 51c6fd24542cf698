"""``Muon``: torch's Muon for matrices and AdamW for everything else, in one optimizer."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from rlhfkit.distributed import full_shape
from rlhfkit.flat_parameters import FlatLayout


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al., 2024, kellerjordan.github.io/posts/muon) for groups with ``"kind": "matrices"``, else AdamW.

    Both are torch's own, over the same groups and states as this optimizer, so that one schedule, one checkpoint and
    one Lightning optimizer hold both. By default Muon's updates have the root mean square of AdamW's (``0.2
    sqrt(max(A, B))``), so that the learning rates and decays of AdamW fit both (Liu et al., 2025, arXiv:2502.16982).

    Muon's step depends on whole matrices. Of matrices in flat tensors (:class:`~rlhfkit.flat_parameters.FlatLayout`),
    which ZeRO divides, each rank keeps the momentum of its part; one rank makes a divided matrix's momentum orthogonal,
    from bfloat16 numbers as torch's Muon, and each rank steps its part (Liu et al., section 2.3).
    """

    flat_layouts: Mapping[Tensor, FlatLayout] = {}
    """The layouts of the parameters that are flat tensors."""

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
            ValueError: If an argument is out of range, or a matrix has less than two dimensions.
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
        self.require_whole()

    def set_flat_layouts(self, layouts: Mapping[Tensor, FlatLayout]) -> None:
        """Take the layout of each flat tensor among the parameters."""
        self.flat_layouts = dict(layouts)

    def layout_of(self, parameter: Tensor, group: Mapping[str, Any]) -> FlatLayout | None:
        """The layout of a flat tensor of a group; ``None``: it is a whole parameter.

        Raises:
            ValueError: If a matrix is flat, and nothing says which matrices are in it.
        """
        layout = self.flat_layouts.get(parameter)
        if layout is None and _is_matrices(group) and len(full_shape(parameter)) < 2:
            raise ValueError(
                f"{type(self).__name__} updates whole matrices and was given a tensor of shape "
                f"{tuple(parameter.shape)}: the strategy flattens or divides weights, and does not say how. Train with "
                "RLHFDeepSpeedStrategy or Trainer(strategy='ddp'), or take optimizer='adamw'"
            )
        return layout

    def require_whole(self) -> None:
        """Raise ValueError if there is a flat tensor of unknown matrices."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self.layout_of(parameter, group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the groups of both. A collective if matrices are divided over ranks."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.require_whole()
        # Loading a state, and DeepSpeed, replace groups and states.
        left: list[dict[str, Any]] = []
        for group in self.param_groups:
            if _is_matrices(group):
                rest = [one for one in group["params"] if one.grad is not None and not self._step_own(one, group)]
                left.append({**group, "params": rest})
        others = [group for group in self.param_groups if not _is_matrices(group)]
        for part, groups in ((self._muon, left), (self._adamw, others)):
            part.param_groups, part.state = groups, self.state
            if any(group["params"] for group in groups):
                cast(Any, part).step()  # torch 2.13 does not type Muon's
        return loss

    @torch.no_grad()
    def _step_own(self, parameter: Tensor, group: Mapping[str, Any]) -> bool:
        """Take the step of torch's Muon where that itself cannot: of parts of matrices; returns whether it was taken.

        Nor can torch 2.13 of bfloat16 without Nesterov's momentum: it makes the momentum itself orthogonal, in place.
        """
        layout = self.layout_of(parameter, group)
        if layout is None and (group["nesterov"] or parameter.dtype != torch.bfloat16):
            return False
        assert parameter.grad is not None
        state = self.state[parameter]
        if MOMENTUM not in state:
            state[MOMENTUM] = torch.zeros_like(parameter)
        momentum, beta = state[MOMENTUM], group["momentum"]
        momentum.lerp_(parameter.grad, 1 - beta)
        update = (parameter.grad.lerp(momentum, beta) if group["nesterov"] else momentum).bfloat16()

        def orthogonal(_number: int, matrix: Tensor) -> Tensor:
            return orthogonalized(matrix, steps=group["ns_steps"], eps=group["eps"])

        directions = orthogonal(0, update) if layout is None else layout.map_whole(orthogonal, [update])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        shapes = [tuple(parameter.shape)] if layout is None else layout.shapes
        for number, (rows, columns) in enumerate(shapes):
            rate = group["lr"] * _rate_ratio(rows, columns, group["adjust_lr_fn"])
            own, direction = (
                one if layout is None else layout.own_part(number, one) for one in (parameter, directions)
            )
            own.add_(direction, alpha=-rate)
        return True


MOMENTUM = "momentum_buffer"
"""The name of torch's Muon for the momentum in its state."""


def orthogonalized(matrix: Tensor, *, steps: int, eps: float) -> Tensor:
    """The nearly orthogonal factor of a bfloat16 matrix, in bfloat16, by the Newton-Schulz iterations of torch's Muon.

    It is the step from zero, at a learning rate of 1, that torch's Muon takes along a gradient without momentum.
    """
    wide = matrix.mT if matrix.size(0) > matrix.size(1) else matrix  # torch iterates so; "original" scales it by 1
    weight = torch.nn.Parameter(torch.zeros_like(wide))
    weight.grad = wide
    muon = torch.optim.Muon(
        [weight],
        lr=1.0,
        weight_decay=0.0,
        momentum=0.0,
        nesterov=False,
        eps=eps,
        ns_steps=steps,
        adjust_lr_fn="original",
    )
    cast(Any, muon).step()
    orthogonal = weight.detach().neg_()
    return orthogonal.mT if matrix.size(0) > matrix.size(1) else orthogonal


def _rate_ratio(rows: int, columns: int, adjust_lr: str) -> float:
    """Factor of the learning rate by the shape of a matrix, as in torch's Muon."""
    if adjust_lr == "original":
        return math.sqrt(max(1, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))


def _is_matrices(group: Mapping[str, Any]) -> bool:
    return group.get("kind") == "matrices"
