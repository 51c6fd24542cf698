"""``StreamEnding``: ends a run when its streams were read a number of times."""

import logging
from typing import Any

import lightning as L

from rlhfkit.datamodules.streams.rows import Position, passes_finished
from rlhfkit.datamodules.tokenization.mixture import Mixture
from rlhfkit.validation import check_integer

log = logging.getLogger(__name__)


class StreamEnding:
    """Tells a Trainer to stop once a number of passes over the data is finished.

    The batch or iteration in which the last one ends is filled from the next pass, so that every row is used and all
    batches have their size. ``data`` is the source, or the mixture whose ``until`` says which source counts.

    Raises:
        ValueError: If ``passes`` is below 1.
    """

    def __init__(self, data: Any, passes: int | None) -> None:
        check_integer("passes", passes, minimum=1, optional=True)
        self._passes = passes
        self._until = data.until if isinstance(data, Mixture) else "all"

    def stop_at(self, trainer: L.Trainer, position: Position | None) -> None:
        """Set ``should_stop`` if the passes were finished in front of a position that was reached."""
        if self._passes is None or passes_finished(position, self._until) < self._passes:
            return
        trainer.should_stop = True
        log.info("passes=%d over the data are finished: the run ends", self._passes)
