"""``Oversampling``: more groups are in flight than are needed; those that finish first are trained on."""

from collections.abc import Iterable, Mapping
from typing import Any

import lightning as L

from rlhfkit.callbacks.rollout.part import RolloutPart, Rollouts
from rlhfkit.callbacks.rollout.sharing import SharedIteration, staleness_metrics
from rlhfkit.rollout.partial_rollouts import Dropped, dropped_from
from rlhfkit.validation import check_number


class Oversampling(RolloutPart):
    """Starts more groups than an iteration needs, and leaves those that finish last to the next one.

    With ``share=0.25`` and an iteration of 8 groups, 10 are started, the 8 that finish first are trained on, and the
    prompts of the others come first in the next iteration. Saves the wait for the longest answers, but favours short
    ones.

    Example::

        RolloutCallback(math_match, engine=VLLMPool(2), parts=[Oversampling(0.25, continued=True)])

    Args:
        share: Further groups in flight, as a share of the iteration, above 0.
        continued: Continue the groups that were not finished in the next iteration, from what was sampled of them,
            instead of sampling them anew (partial rollouts); each token records its version, the older ones are
            corrected for as with :class:`~rlhfkit.Ahead`.

    Raises:
        ValueError: If ``share`` is out of range, or, when a ``RolloutCallback`` takes it, if the engine cannot drop or
            continue what it has begun.
    """

    def __init__(self, share: float, *, continued: bool = False) -> None:
        check_number("share", share, above=0, why="Oversampling has further groups in flight, a share of the iteration")
        self.share = share
        self.continued = continued
        self.partials: dict[int, Dropped] | None = {} if continued else None
        """What iterations continue, by number, until they were trained on: a resumed run continues the same."""
        self.staleness = None if continued else 0  # an iteration more each time that a sample is cut

    def attach(self, rollouts: Rollouts) -> None:
        super().attach(rollouts)
        self.collector = rollouts.collector
        if not self.collector.source.can_stream:
            raise ValueError(
                f"Oversampling({self.share:g}) drops what is not finished first, and "
                f"{type(self.collector.engine).__name__} cannot (can_stream is false): use LocalEngine or VLLMPool, or "
                "leave it out"
            )
        problem = None if self.partials is None else self.collector.source.resume_problem(rollouts.sampling)
        if problem is not None:
            raise ValueError(
                f"Oversampling(continued=True) continues samples that were cut, which is not possible here: {problem}. "
                "Use continued=False, another engine (LocalEngine, VLLMPool) or other sampling"
            )
        self.collector.spare_share, self.collector.partials = self.share, self.partials

    def check(self, trainer: L.Trainer) -> None:
        """Raise ValueError if ranks cannot see which group is first."""
        if not self.collector.engine.shared and trainer.world_size > 1:
            raise ValueError(
                f"Oversampling({self.share:g}) takes the groups that are finished first, and an engine in each of "
                f"{trainer.world_size} ranks finishes its groups together: use a VLLMPool, which all ranks share, or "
                "leave it out"
            )

    def metrics(self, shared: SharedIteration, version: int) -> Mapping[str, float]:
        """Return shares of the groups that were dropped and continued, and how old the tokens are."""
        collected = shared.collected
        started = collected.requeued + collected.sampled
        dropped = {"rollout/dropped_fraction": collected.requeued / started}
        if self.partials is None:
            return dropped
        dropped["rollout/continued_fraction"] = collected.continued / started
        return dropped | staleness_metrics(shared.numbers, version)

    # ------------------------------------------------------------------ what is continued

    def clear(self) -> None:
        if self.partials is not None:
            self.partials.clear()

    def end_iteration(self, next_iteration: int) -> None:
        if self.partials is not None:
            for number in [number for number in [*self.partials] if number < next_iteration]:
                del self.partials[number]

    def state_dict(self, next_iteration: int) -> Any:
        dropped = (self.partials or {}).get(next_iteration)  # what later ones continue is dropped again
        return [] if dropped is None else [dropped.state(next_iteration)]

    def load_state_dict(self, own: Iterable[Any], states: Iterable[Any], *, rank: int, world_size: int) -> None:
        """Take saved groups; a rank's own entries say who has what also to one that takes over no groups."""
        if self.partials is not None:
            self.partials.clear()
            self.partials |= dropped_from([*own, *states], rank=rank, world_size=world_size)
