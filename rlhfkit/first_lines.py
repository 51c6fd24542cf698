"""The first lines of a run: tips of other libraries are left out, and a summary of the run is printed.

The environment variable ``RLHFKIT_VERBOSE=1`` brings the tips back. The summary stands where Lightning's table of
modules would, so ``Trainer(enable_model_summary=False)`` leaves it out. It goes to the standard error stream.
"""

import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import lightning as L
    from torch import nn

LIGHTNING_LINES = (
    *("GPU available:", "TPU available:", "HPU available:", "💡 Tip:"),
    "Loading `train_dataloader` to estimate number of stepping batches.",
)
TIPS: Mapping[str, tuple[str, ...]] = {
    "DeepSpeed": ("Setting accelerator to CPU.",),
    "lightning.pytorch.utilities.rank_zero": LIGHTNING_LINES,
    "lightning.fabric.utilities.rank_zero": LIGHTNING_LINES,
}
"""How the messages begin that are left out, by the name of their logger."""

WARNINGS: tuple[tuple[str, type[Warning]], ...] = (
    (r"Starting from v1\.9\.0, `tensorboardX` has been removed", UserWarning),  # of Lightning
    (r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning),  # of torch, about Lightning
    (r"torch\.distributed\.nn\.functional\.all_gather is deprecated", FutureWarning),  # of torch, about Lightning
)
"""Warnings that are left out: a regular expression of how the message begins, and the category."""

BAR_DELAY = 10.0
"""Seconds after which a bar of a model's weights appears."""


def is_verbose() -> bool:
    """Whether ``RLHFKIT_VERBOSE`` is set, to anything but 0."""
    return os.environ.get("RLHFKIT_VERBOSE", "0") not in ("", "0")


class TipFilter(logging.Filter):
    """Leaves out the messages of a logger that begin with one of some texts."""

    def __init__(self, beginnings: tuple[str, ...]) -> None:
        super().__init__()
        self.beginnings = beginnings

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a message is printed."""
        return is_verbose() or not record.getMessage().startswith(self.beginnings)


def silence_tips() -> None:
    """Leave out :data:`TIPS` and :data:`WARNINGS` in this process; other messages and all levels stay as they are."""
    for name, beginnings in TIPS.items():
        logger = logging.getLogger(name)
        if not any(isinstance(one, TipFilter) for one in logger.filters):
            logger.addFilter(TipFilter(beginnings))
    if not is_verbose():
        for message, category in WARNINGS:
            warnings.filterwarnings("ignore", message=message, category=category)


@contextmanager
def without_weights_bar() -> Iterator[None]:
    """Inside, Transformers' bar of weights that are loaded or saved appears only after :data:`BAR_DELAY`."""
    from transformers.utils import logging as transformers_logging

    set_hook = getattr(transformers_logging, "set_tqdm_hook", None)  # not in all versions
    if set_hook is None or is_verbose():
        yield
        return
    previous = set_hook(None)

    def delayed(factory: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        if kwargs.get("desc") in ("Loading weights", "Writing model shards"):
            kwargs = {"delay": BAR_DELAY, **kwargs}
        return factory(*args, **kwargs) if previous is None else previous(factory, args, kwargs)

    set_hook(delayed)
    try:
        yield
    finally:
        set_hook(previous)


@contextmanager
def without_file_bars() -> Iterator[None]:
    """Inside, ``datasets`` shows no bars of the files that it converts."""
    import datasets

    chosen = datasets.config.HF_DATASETS_DISABLE_PROGRESS_BARS is not None
    if chosen or is_verbose() or datasets.are_progress_bars_disabled():
        yield
        return
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()


@contextmanager
def without_load_report(expected: Callable[[Mapping[str, Any]], bool]) -> Iterator[dict[str, Any]]:
    """Inside, hold back Transformers' report of weights that are missing or left over.

    Yields a dictionary for what ``from_pretrained(output_loading_info=True)`` returns beside the model. The report is
    printed in the end unless ``expected`` of it is true.
    """
    logger, held, found = logging.getLogger("transformers.modeling_utils"), [], dict[str, Any]()

    def hold(record: logging.LogRecord) -> bool:
        report = " LOAD REPORT" in record.getMessage()
        if report:
            held.append(record)
        return not report

    logger.addFilter(hold)
    try:
        yield found
    finally:
        logger.removeFilter(hold)
        if is_verbose() or not found or not expected(found):
            for record in held:
                logger.handle(record)


# ---------------------------------------------------------------------- the summary of a run


def _replaces_summary(trainer: "L.Trainer") -> bool:
    """Whether the Trainer prints a summary of models."""
    from lightning.pytorch.callbacks import ModelSummary

    from rlhfkit.trainer_parts import callbacks_of

    return any(isinstance(one, ModelSummary) for one in callbacks_of(trainer))


def replace_model_summary(trainer: "L.Trainer") -> None:
    """Have Lightning's own table of modules left out, which a Trainer prints unless told otherwise.

    One with another depth was asked for and stays.
    """
    from lightning.pytorch.callbacks import ModelSummary, RichModelSummary

    from rlhfkit.trainer_parts import callbacks_of

    for one in callbacks_of(trainer):
        if not isinstance(one, ModelSummary) or type(one) not in (ModelSummary, RichModelSummary) or is_verbose():
            continue
        if one._max_depth == 1:
            one._max_depth = 0


def print_run(module: Any) -> None:
    """Print model, data, and where logs and checkpoints go, before a run begins. A collective.

    ``module`` is a LightningModule that is being fitted.
    """
    trainer = module.trainer
    if not _replaces_summary(trainer):
        return
    from rlhfkit.protocols import DescribesData
    from rlhfkit.trainer_parts import datamodule_of

    data = datamodule_of(trainer)
    described = data.describe_data() if isinstance(data, DescribesData) else "loaders of your own"
    folder = trainer.log_dir  # a collective
    logs = ", ".join(type(one).__name__ for one in trainer.loggers)
    saved = [str(one.dirpath) for one in trainer.checkpoint_callbacks if getattr(one, "dirpath", None)]
    places = [f"logs in {_shown(folder)} ({logs})"] if logs and folder else [f"logs by {logs}"] if logs else []
    places += [f"checkpoints in {_shown(path)}" for path in dict.fromkeys(saved)]
    missing = [] if logs else ["no logger, so that metrics are kept nowhere"]
    missing += [] if trainer.checkpoint_callbacks else ["no checkpoints, so that the run cannot be resumed"]
    if trainer.limit_val_batches == 0 or getattr(data, "validation_data", data) is None:
        missing.append("no validation data")
    _print("model", f"{_models(module)}; {_devices(trainer)}")
    _print("data", described)
    if places:
        _print("files", "; ".join(places))
    if missing:
        _print("missing", "; ".join(missing))


def print_sizes(module: Any) -> None:
    """Print the sizes of an epoch or iteration, and the number of updates, when the loaders are made."""
    trainer = module.trainer
    if not _replaces_summary(trainer):
        return
    from rlhfkit.protocols import ExperienceSource
    from rlhfkit.trainer_parts import callbacks_of, datamodule_of, epochs_of

    data, batches, accumulate = datamodule_of(trainer), trainer.num_training_batches, trainer.accumulate_grad_batches
    source = next((one for one in callbacks_of(trainer) if isinstance(one, ExperienceSource)), None)
    per_rank = f" on each of {trainer.world_size} ranks" if trainer.world_size > 1 else ""
    capped = source is not None and getattr(data, "max_tokens_per_micro_batch", None) is not None
    what = f"{batches} micro-batch{'' if batches == 1 else 'es'}{per_rank}"
    if capped:
        what = f"at least {what} (as many as their tokens need)"
    if source is not None and not trainer.fast_dev_run:
        prompts, size, epochs = int(getattr(data, "rollout_batch_size", 0)), source.group_size, epochs_of(trainer)
        times = f", each trained on {epochs} times" if epochs > 1 else ""
        what = f"{prompts} prompts x {size} = {prompts * size} samples{times}, in {what}"
    unit = "epoch" if source is None else "iteration"
    total, epochs = trainer.estimated_stepping_batches, trainer.max_epochs
    known = math.isfinite(total) and total >= 0
    if math.isfinite(batches):
        updates = math.ceil(batches / accumulate)
        text = f"one {unit} is {what} and {_count(updates, 'update')}"
    else:
        text = f"a stream of micro-batches, {accumulate} an update"
    ends = f"{_count(int(total), 'update')} in all" if known else "no end is set"
    if known and epochs is not None and epochs > 0 and math.isfinite(batches):
        ends += f" in {_count(epochs, unit)}"
    if trainer.global_step:
        ends += f", of which {trainer.global_step} are made"
    _print("steps", f"{text}; {ends}")


def _print(label: str, text: str) -> None:
    from lightning.pytorch.utilities import rank_zero_info

    rank_zero_info(f"{label + ':':9}{text}")


def _models(module: Any) -> str:
    """Name, class and size of the policy, and the sizes of the models beside it."""
    described: list[str] = []
    for name, child in module.named_children():
        total, trained = _size(child)
        if not total:
            continue
        share = "frozen" if not trained else "trained" if trained == total else f"{_short(trained)} trained"
        if name == "policy":
            model = getattr(child, "module", child)  # of a wrapper that divides or counts
            kind = type(getattr(model, "model", model) if type(model).__name__ == "ScalarModel" else model).__name__
            described.insert(0, f"{module.model_name}, {kind} of {_short(total)} parameters ({share})")
        else:
            described.append(f"{name} of {_short(total)} ({share})")
    return ", ".join(described) or str(getattr(module, "model_name", type(module).__name__))


def _size(model: "nn.Module") -> tuple[int, int]:
    """Number of parameters, and of those that are trained; of whole tensors also where they are divided."""
    total = trained = 0
    for one in model.parameters():
        quantized: Any = getattr(one, "quant_state", None)  # two numbers in a byte
        count = int(getattr(one, "ds_numel", one.numel())) if quantized is None else math.prod(quantized.shape)
        total += count
        trained += count * one.requires_grad
    return total, trained


def _devices(trainer: "L.Trainer") -> str:
    device = trainer.strategy.root_device.type
    ranks = f"{trainer.world_size} x {device}, {type(trainer.strategy).__name__}" if trainer.world_size > 1 else device
    return f"precision {trainer.precision}; {ranks}"


def _short(count: int) -> str:
    """A number in three digits: 1.24 B."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _shown(path: str) -> str:
    """A path from the working directory, if it is below it."""
    whole, here = Path(path).absolute(), Path.cwd()
    return str(whole.relative_to(here)) if whole.is_relative_to(here) else str(whole)
