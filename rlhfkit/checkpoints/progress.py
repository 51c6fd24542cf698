"""The counters of Lightning's loops in a checkpoint: put right before they are loaded, rewound when they are saved.

Lightning counts four moments of each epoch and batch: ready, started, processed, completed. ``on_train_batch_end``,
where ``ModelCheckpoint(every_n_train_steps=...)`` saves, comes after "processed" and before "completed".

Lightning 2.6.6 continues wrongly from a checkpoint of an epoch's last batch. ``_FitLoop.reset`` counts the epoch as
processed and completed, but ``on_advance_start`` still takes the run for one that was stopped inside an epoch, so that
it neither counts the next epoch as ready nor calls ``on_train_epoch_start``. "ready" stays one behind from there on; a
checkpoint that is saved inside that epoch looks like one of an epoch's end, and resuming it trains the epoch once more.
The code came with https://github.com/Lightning-AI/pytorch-lightning/pull/20379 (2.5.0); 2.5.6 and 2.6.0 do the same. We
have found no report of it as of November 2026. The nearest is
https://github.com/Lightning-AI/pytorch-lightning/issues/19617 (``max_steps`` at the end of an epoch), which
:func:`settle` also corrects.
"""

from typing import Any

Counters = dict[str, Any]
"""``checkpoint["loops"]["fit_loop"]``."""


def settle(fit: Counters) -> None:
    """Bring the counters of a checkpoint into a form from which Lightning continues exactly.

    A finished epoch becomes one whose end was reached, with the batches of the next one not begun, whichever hook saved
    it; inside an epoch, a "ready" that stayed behind is put right. Settled counters are left as they are.

    Args:
        fit: Changed in place.
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
        _finish(fit, epoch["ready"])
    elif epoch["started"] == epoch["processed"]:  # an epoch's end, or the hook at the next one's start
        _finish(fit, epoch["processed"])


def _finish(fit: Counters, epochs: int) -> None:
    """As many epochs are done in every respect, and no batch of the next one is begun."""
    for counts in fit["epoch_progress"].values():
        counts.update(dict.fromkeys(counts, epochs))
    batches = fit["epoch_loop.batch_progress"]
    batches["total"].update(dict.fromkeys(batches["total"], batches["total"]["ready"]))
    batches["current"].update(dict.fromkeys(batches["current"], 0))
    batches["is_last_batch"] = False


def rewind(fit: Counters, batches: int) -> None:
    """Take back the last batches of the epoch, as if they had not been asked for.

    Args:
        fit: Changed in place.
        batches: How many.
    """
    progress = fit["epoch_loop.batch_progress"]
    for counts in (progress["total"], progress["current"]):
        counts.update(dict.fromkeys(counts, counts["ready"] - batches))
    progress["is_last_batch"] = False


def unfinished_batches(trainer: Any) -> int:
    """Batches of the epoch that were asked for since the last optimizer step: those of an open accumulation window.

    Args:
        trainer: While it fits.

    Returns:
        0 when weights, counters and loaders stand at the same optimizer step.
    """
    loop = trainer.fit_loop
    batch = loop.epoch_loop.batch_progress.current
    if batch.ready == batch.processed and not loop._should_accumulate():
        return 0
    window = trainer.accumulate_grad_batches
    return batch.ready - batch.processed // window * window


def is_batch_on_its_way(trainer: Any) -> bool:
    """Whether a loader has handed out a batch that the loops do not count yet: it is being moved to the device.

    Args:
        trainer: While it fits.
    """
    fetcher = trainer.fit_loop._data_fetcher
    # Without a length, fetchers are one batch ahead at all times.
    counted = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    return fetcher is not None and fetcher.length is not None and fetcher.fetched == counted + 1
