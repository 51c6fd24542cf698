"""The counters of Lightning's loops in a checkpoint: rewound when they are saved, corrected before they are loaded.

Lightning counts four events of each epoch and batch: ready, started, processed, completed. ``on_train_batch_end``,
where ``ModelCheckpoint(every_n_train_steps=...)`` saves, comes after "processed" and before "completed".

Lightning 2.6.6 resumes wrongly from a checkpoint of the last batch of an epoch. ``_FitLoop.reset`` counts the epoch as
processed and completed, but ``on_advance_start`` still treats the run as stopped inside an epoch, so it neither counts
the next epoch as ready nor calls ``on_train_epoch_start``. From then on "ready" is one too low; a checkpoint saved
inside that epoch looks like one of the end of an epoch, and resuming it trains the epoch once more. The code came with
https://github.com/Lightning-AI/pytorch-lightning/pull/20379 (2.5.0); 2.5.6 and 2.6.0 do the same. We have found no
report of it as of November 2026. The nearest is https://github.com/Lightning-AI/pytorch-lightning/issues/19617
(``max_steps`` at the end of an epoch), which :func:`normalize_counters` also corrects.
"""

from typing import Any

Counters = dict[str, Any]
"""``checkpoint["loops"]["fit_loop"]``."""


def normalize_counters(fit: Counters) -> None:
    """Correct the counters of a checkpoint, in place, so that Lightning resumes exactly.

    After the last batch of an epoch, the epoch is counted as completed and the next one as not begun; inside an epoch,
    a "ready" that is one too low is corrected.
    """
    epochs, batches = fit["epoch_progress"], fit["epoch_loop.batch_progress"]
    epoch, batch = epochs["current"], batches["current"]
    after_batch = batch["completed"] < batch["processed"] == batch["ready"]  # saved in on_train_batch_end
    last = batches["is_last_batch"]
    if epoch["processed"] == epoch["ready"] and batch["ready"] > 0 and (after_batch or not last):
        for counts in epochs.values():
            counts["ready"] += 1
            counts["started"] = counts["ready"]
    if after_batch and last:
        fit["epoch_loop.state_dict"]["_batches_that_stepped"] += 1  # counted after the hook
        _complete_epochs(fit, epoch["ready"])
    elif epoch["started"] == epoch["processed"]:  # an epoch's end, or the hook at the next one's start
        _complete_epochs(fit, epoch["processed"])


def _complete_epochs(fit: Counters, epochs: int) -> None:
    """Count ``epochs`` epochs as completed, and no batch of the next one as begun."""
    for counts in fit["epoch_progress"].values():
        counts.update(dict.fromkeys(counts, epochs))
    batches = fit["epoch_loop.batch_progress"]
    batches["total"].update(dict.fromkeys(batches["total"], batches["total"]["ready"]))
    batches["current"].update(dict.fromkeys(batches["current"], 0))
    batches["is_last_batch"] = False


def rewind(fit: Counters, batches: int) -> None:
    """Uncount the last ``batches`` of the epoch, in place, as if they had not been fetched."""
    progress = fit["epoch_loop.batch_progress"]
    for counts in (progress["total"], progress["current"]):
        counts.update(dict.fromkeys(counts, counts["ready"] - batches))
    progress["is_last_batch"] = False
