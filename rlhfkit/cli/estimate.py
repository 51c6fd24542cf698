"""``rlhfkit estimate``: memory per GPU, number of GPUs and a coarse time of a configuration, without starting it."""

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlhfkit.costs import GPUS

if TYPE_CHECKING:
    from rlhfkit.costs.estimation import Estimate

_DESCRIPTION = """Estimate memory per GPU, the number of GPUs, a coarse time, and the first thing that does not fit.

All other options are those of rlhfkit fit: --config run.yaml, --trainer.devices 8, --model.init_args.lora.rank 16 ...
Nothing is started, no weights are loaded, no GPU is needed. Exits with 1 if something does not fit.
"""


def parser() -> argparse.ArgumentParser:
    """The options that ``rlhfkit fit`` does not have."""
    options = argparse.ArgumentParser(
        prog="rlhfkit estimate",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    options.add_argument("--gpu", default="H100", help=f"one of {', '.join(GPUS)} (default: H100)")
    options.add_argument("--prompt-tokens", type=float, help="mean tokens of a prompt (default: its limit)")
    options.add_argument("--answer-tokens", type=float, help="mean tokens of an answer (default: its limit)")
    options.add_argument("--json", action="store_true", help="print one line of JSON in place of tables")
    return options


def estimate_command(words: Sequence[str]) -> None:
    """Run the command with the words after its name.

    Raises:
        SystemExit: With 1 if something does not fit, or a size is missing or wrong.
    """
    options, rest = parser().parse_known_args(list(words))
    sizes = {"prompt_tokens": options.prompt_tokens, "answer_tokens": options.answer_tokens}
    found = estimate_configuration(rest, gpu=options.gpu, **sizes)
    if options.json:
        print(json.dumps(found.to_dict()))
    else:
        from rich.console import Console

        Console().print(found.table(), highlight=False)
    if found.problems:
        raise SystemExit(1)


def estimate_configuration(words: Sequence[str], **arguments: Any) -> "Estimate":
    """Estimate the run that ``rlhfkit fit`` would start with these words.

    Args:
        words: Options of ``fit``: ``["--config", "run.yaml"]``.
        **arguments: See :func:`~rlhfkit.costs.estimation.estimate`; those of the Trainer come from the configuration.

    Raises:
        ValueError: If the configuration leaves the number of GPUs open.
    """
    from rlhfkit.callbacks import RolloutCallback
    from rlhfkit.cli.main import lightning_cli
    from rlhfkit.costs.estimation import estimate

    cli = lightning_cli(["fit", *words], start=False)
    trainer = cli.config_init.fit.trainer
    callbacks = trainer.callbacks or []
    callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
    return estimate(
        cli.model,
        cli.datamodule,
        next((one for one in callbacks if isinstance(one, RolloutCallback)), None),
        strategy=trainer.strategy,
        devices=_devices(trainer.devices),
        num_nodes=trainer.num_nodes,
        precision=trainer.precision or "32-true",
        accumulate_grad_batches=trainer.accumulate_grad_batches,
        **arguments,
    )


def _devices(devices: Any) -> int:
    """How many devices the Trainer's argument names."""
    if isinstance(devices, list):
        return len(devices)
    text = str(devices)
    if text.isdigit() and int(text) > 0:
        return int(text)
    if "," in text:
        return len([one for one in text.split(",") if one.strip()])
    raise ValueError(f"trainer.devices={devices!r} leaves the number of GPUs open: give --trainer.devices 8")
