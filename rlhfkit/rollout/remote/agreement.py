"""Whether engines serve the same weights, by what each says of the log-probs of the same tokens."""

import itertools
import logging
from collections.abc import Mapping

import torch
from torch import Tensor

from rlhfkit.rollout.errors import EngineError
from rlhfkit.rollout.probe_bounds import ProbeBounds

log = logging.getLogger(__name__)


def same_scores(
    scores: Mapping[int, list[list[float]]], bounds: ProbeBounds, *, owner: str = "the pool"
) -> list[list[float]]:
    """Return the log-probs of the first engine, after a comparison of all others with them.

    Args:
        scores: By engine, at least one: log-probs of the tokens of each sequence.
        bounds: How far apart they may be; a warning is logged between its two bounds.
        owner: Class whose ``probe_tolerance`` set the bound, for the error.

    Raises:
        EngineError: If an engine differs from the first by more than ``bounds.fail``, or is NaN.
    """
    (reference, expected), *others = scores.items()
    first = _flat(expected)
    for engine, other in others:
        difference = bounds.measure(_flat(other) - first)
        kind = "" if bounds.statistic == "max" else " on average"
        found = f"their log-probs of the same tokens differ by {difference:.3g}{kind}"
        if not difference <= bounds.fail:  # true for NaN as well
            raise EngineError(
                f"engines {reference} and {engine} serve different weights: {found}, more than "
                f"{owner}(probe_tolerance={bounds.fail:g})"
            )
        if difference > bounds.warn:
            log.warning("engines %s and %s may compute differently: %s", reference, engine, found)
    return expected


def _flat(scores: list[list[float]]) -> Tensor:
    return torch.tensor([*itertools.chain.from_iterable(scores)], dtype=torch.float64)
