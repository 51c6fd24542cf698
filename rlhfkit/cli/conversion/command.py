"""``rlhfkit convert-config trl.yaml --trainer grpo``: a configuration of TRL's command line as one of ours."""

import sys
from pathlib import Path
from typing import Literal

from rlhfkit.cli.conversion import trl, trl_on_policy
from rlhfkit.cli.conversion.conversion import Configuration, Conversion

Trainer = Literal["sft", "reward", "dpo", "kto", "grpo", "rloo"]


def convert_config(
    source: Path,
    output: Path | None = None,
    *,
    trainer: Trainer,
    devices: int = 1,
    allow_differences: bool = False,
) -> None:
    """Write what ``rlhfkit fit --config`` reads, if that trains as TRL would.

    Args:
        source: YAML file of ``trl sft``, ``trl grpo`` and so on (TRL 1.16).
        output: File that is written; left out: standard output.
        trainer: The command of TRL that the file is for.
        devices: Processes that TRL is started on, which sizes of batches depend on.
        allow_differences: Write the file even if it would train differently; comments at its top say how.

    Raises:
        ValueError: If something cannot be converted exactly; the message lists all of it.
    """
    import yaml

    read = yaml.safe_load(source.read_text())
    if not isinstance(read, dict):
        raise ValueError(f"{source} holds {type(read).__name__}, no mapping of options")
    conversion = Conversion(read)
    configuration = convert_trl(conversion, trainer, devices)
    if conversion.differences and not allow_differences:
        listed = "\n  ".join(conversion.differences)
        raise ValueError(
            f"{source} cannot be converted exactly:\n  {listed}\n--allow_differences true writes it nevertheless"
        )
    remarks = [f"Differs: {line}" for line in conversion.differences] + [f"Note: {line}" for line in conversion.notes]
    head = "".join(f"# {line}\n" for line in [f"Converted from {source.name} of trl {trainer}.", *remarks])
    text = head + yaml.safe_dump(configuration, sort_keys=False)
    if output is None:
        sys.stdout.write(text)
    else:
        output.write_text(text)


def convert_trl(conversion: Conversion, kind: Trainer, devices: int) -> Configuration:
    """Convert the options of one of TRL's trainers."""
    conversion.take("env")
    trl.convert_shared(conversion, kind)
    trl.convert_source(conversion)
    if kind in trl.SUPERVISED:
        trl.convert_batches(conversion)
        module, data = trl.SUPERVISED[kind](conversion)
    else:
        convert = trl_on_policy.convert_grpo if kind == "grpo" else trl_on_policy.convert_rloo
        module, data = convert(conversion, devices)
    conversion.ignore(trl.HARMLESS)
    conversion.finish()
    conversion.trainer["devices"] = devices  # left out, Lightning would take all GPUs of the machine
    return {
        "seed_everything": conversion.data["seed"],
        "model": {"class_path": module, "init_args": conversion.model},
        "data": {"class_path": data, "init_args": conversion.data},
        "trainer": {**conversion.trainer, "callbacks": conversion.callbacks},
    }
