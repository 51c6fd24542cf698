"""``IterationLength``: tells Lightning how many micro-batches the iteration has that was just collected.

With ``PromptDataModule(max_tokens_per_micro_batch=...)`` the number follows from the samples, so it is unknown when
Lightning (2.6.6) asks for the length of the loader. What Lightning derived from it is set again inside the ``next()``
of the first micro-batch, before the fetcher compares its count with the length.
"""

import lightning as L


class IterationLength:
    """Sets the number of micro-batches of the current iteration in a Trainer, and ``accumulate_grad_batches``.

    Every iteration has the same number of optimizer updates, and all updates of an iteration equally many
    micro-batches; ``global_step``, schedules and ``estimated_stepping_batches`` count updates as ever.
    """

    def __init__(self, trainer: L.Trainer, updates: int) -> None:
        """``updates``: optimizer updates of each iteration.

        Raises:
            ValueError: If the Trainer has a number of micro-batches of its own.
        """
        check_trainer(trainer)
        self._trainer = trainer
        self._updates = updates

    def set(self, micro_batches: int) -> None:
        """Set the number of micro-batches of the iteration whose first micro-batch comes next, or whose rest."""
        trainer, loop = self._trainer, self._trainer.fit_loop
        trainer.accumulate_grad_batches = micro_batches // self._updates
        if loop._combined_loader is not None:
            loop._combined_loader.limits = [micro_batches]
        fetcher = loop._data_fetcher
        if fetcher is None:  # a checkpoint is being restored: Lightning asks the loader again after this
            return
        fetcher.length = micro_batches
        if loop.max_batches == micro_batches:
            return
        loop.max_batches = micro_batches
        if trainer.val_check_batch is not None:  # None: validation by time
            trainer.val_check_batch = max(1, int(micro_batches * trainer.val_check_interval))
        bar = trainer.progress_bar_callback
        if bar is not None:
            bar.on_train_epoch_start(trainer, trainer.lightning_module)  # reads the number of batches

    def reset(self) -> None:
        """Give the Trainer its own ``accumulate_grad_batches`` back, for the next run."""
        self._trainer.accumulate_grad_batches = 1


def check_trainer(trainer: L.Trainer) -> None:
    """Raise ValueError if arguments of the Trainer count micro-batches, whose number differs between iterations."""
    if trainer.accumulate_grad_batches != 1:
        raise ValueError(
            f"accumulate_grad_batches={trainer.accumulate_grad_batches}: with max_tokens_per_micro_batch the number of "
            "micro-batches of an update follows from the tokens of its samples. Leave it out, and say how many updates "
            "an iteration has: PromptDataModule(updates_per_iteration=...)"
        )
    if isinstance(trainer.val_check_interval, int):
        raise ValueError(
            f"val_check_interval={trainer.val_check_interval} counts micro-batches, whose number differs between "
            "iterations with max_tokens_per_micro_batch: give a share of an iteration (0.5), or check_val_every_n_epoch"
        )
