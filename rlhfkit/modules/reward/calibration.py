"""``Calibration``: do events that a model gives a probability of p happen in a share p of the cases?

Everything is kept as sums, so that the sums of all ranks give exactly what one rank with all the data has.
"""

import torch
from torch import Tensor

BINS = 20


class Calibration:
    """Accuracy, expected calibration error and Brier score of predicted probabilities.

    The expected calibration error is that of Guo et al. (2017, arXiv:1706.04599, equation 3) with 20 equal bins of the
    predicted probability; the score is Brier's (1950), ``mean (p - y)²``.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        """Start with nothing.

        Args:
            device: Where the sums are kept.
        """
        self.sums = torch.zeros(BINS, 5, dtype=torch.float64, device=device)
        """(20, 5): in each bin the number of cases, and the sums of p, y, (p - y)² and of right predictions."""

    def add(self, probability: Tensor, outcome: Tensor) -> None:
        """Count cases.

        Args:
            probability: (N,) p, predicted.
            outcome: (N,) y, 0 or 1, or the known probability.
        """
        p, y = probability.detach().double(), outcome.detach().double()
        right = ((p >= 0.5) == (y > 0.5)).double()
        case = torch.stack([torch.ones_like(p), p, y, (p - y).square(), right], -1)
        self.sums.index_add_(0, (p * BINS).long().clamp(max=BINS - 1), case)

    def metrics(self) -> dict[str, float]:
        """``accuracy``, ``ece`` and ``brier``, each in [0, 1]; 0 without cases."""
        count, p, y, squares, right = self.sums.unbind(-1)
        total = count.sum().clamp(min=1.0)
        return {
            "accuracy": float(right.sum() / total),
            "ece": float((p - y).abs().sum() / total),
            "brier": float(squares.sum() / total),
        }
