"""``rlhfkit fit --config run.yaml``: Lightning's command line with the modules, data and callbacks of rlhfkit.

Every constructor argument can be set: classes are named by ``class_path``, their arguments by ``init_args``, in YAML
or as ``--model.init_args.lr 1e-6``. ``rlhfkit fit --print_config`` writes a complete file to start from.
"""

import os
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pkgutil import resolve_name
from typing import Any, NoReturn

from rlhfkit.cli.errors import of_parser, print_error, short_errors

TRAINER_COMMANDS = {
    "fit": "train a module",
    "validate": "run the validation loop once",
    "test": "run the test loop once",
    "predict": "run the prediction loop",
}
"""Commands of LightningCLI and their one-line help."""

FUNCTION_COMMANDS: dict[str, tuple[str, str]] = {
    "export": ("a checkpoint's model as a Hugging Face folder", "rlhfkit.cli.export:export"),
    "merge-adapter": ("a LoRA adapter merged into its base model", "rlhfkit.cli.export:merge_adapter"),
    "generate": ("sample completions of prompts, as JSON lines", "rlhfkit.cli.generate:generate"),
    "evaluate": ("sample and grade answers to a benchmark, with metrics", "rlhfkit.cli.evaluate:evaluate"),
    "score": ("add a reward to each line of completions", "rlhfkit.cli.score:score"),
    "serve-reward": ("a reward model or function over HTTP", "rlhfkit.cli.serve_reward:serve_reward"),
    "parts": ("features that can be passed to modules and rollouts", "rlhfkit.cli.parts:parts"),
}
"""Other commands: one-line help, and the function that is called (``module:function``)."""

WORD_COMMANDS: dict[str, tuple[str, str]] = {
    "doctor": (
        "what this machine has, what works, and the cure for what does not",
        "rlhfkit.cli.doctor:doctor_command",
    ),
    "demo": ("a small model learns to add, in four minutes on a laptop", "rlhfkit.cli.demo:demo_command"),
    "init": ("write a configuration of a method, with comments", "rlhfkit.cli.init:init_command"),
    "estimate": ("memory and time of a configuration, before it runs", "rlhfkit.cli.estimate:estimate_command"),
    "report": ("one page that compares the reports of runs", "rlhfkit.cli.report:report_command"),
}
"""Other commands that read their words themselves: one-line help, and the function that gets them."""

COMMANDS = TRAINER_COMMANDS | {name: text for name, (text, _) in (WORD_COMMANDS | FUNCTION_COMMANDS).items()}
"""All commands and their one-line help."""

_HELP = """usage: rlhfkit [-h] [--version] {{{names}}} ... [--debug]

Composable RLHF building blocks for PyTorch Lightning.

commands:
{commands}

examples:
  rlhfkit init grpo run.yaml             # a configuration with comments; rlhfkit init lists the methods
  rlhfkit fit --config run.yaml --model.init_args.lr 1e-6 --trainer.max_epochs 10
  rlhfkit fit --config rlhfkit://grpo    # that of the package
  rlhfkit estimate --config run.yaml --gpu H100
  rlhfkit fit --model rlhfkit.GRPOModule --data rlhfkit.PromptDataModule --print_config
  rlhfkit fit --help                     (all options; takes a few seconds to load Lightning)

Modules of the current folder can be named: reward: my_file.my_reward. Errors have at most five lines;
--debug shows the traceback.
"""


def help_text() -> str:
    """Return the text of ``rlhfkit --help``, without importing Lightning."""
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {text}" for name, text in COMMANDS.items())
    return _HELP.format(names=",".join(COMMANDS), commands=commands)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the ``rlhfkit`` command with these arguments; ``None``: ``sys.argv[1:]``."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    words = [word for word in given if word != "--debug"]
    if not words or words[0] in ("-h", "--help"):
        print(help_text())
        return
    if words[0] == "--version":
        from rlhfkit._version import __version__

        print(__version__)
        return
    if not words[0].startswith("-") and words[0] not in COMMANDS:  # Lightning's error would list its own commands only
        print(f"rlhfkit: unknown command {words[0]!r}; choose from {', '.join(COMMANDS)}", file=sys.stderr)
        raise SystemExit(2)
    folder = os.getcwd()
    if folder not in sys.path:  # as python -m has it, not a console script
        sys.path.insert(0, folder)
    with short_errors(words[0], debug=words != given):
        if words[0] in FUNCTION_COMMANDS:
            _call(FUNCTION_COMMANDS[words[0]][1], words)
        elif words[0] in WORD_COMMANDS:
            resolve_name(WORD_COMMANDS[words[0]][1])(words[1:])
        else:
            lightning_cli(words)


def _call(target: str, words: Sequence[str]) -> Any:
    """Call a function with the arguments of a command line."""
    from jsonargparse import auto_cli

    return auto_cli(resolve_name(target), args=list(words[1:]), prog=f"rlhfkit {words[0]}")


def lightning_cli(arguments: Sequence[str], *, start: bool = True) -> Any:
    """Run a command such as ``["fit", "--config", "run.yaml"]`` and return the LightningCLI.

    Unless ``start``, it has module, data and callbacks but no Trainer, and nothing runs.
    """
    from rlhfkit.cli.init import with_files

    arguments = with_files(arguments)
    import lightning as L
    from lightning.pytorch.cli import LightningCLI

    from rlhfkit.costs import MemoryCheck, Throughput
    from rlhfkit.strategies.strategy import register

    warnings.filterwarnings("ignore", message="LightningCLI's args parameter")  # this function is that use
    register()
    package = import_module("rlhfkit")
    for name in package.__all__:  # a class has its short name in configurations once it is imported
        getattr(package, name)
    import_module("rlhfkit.rewards")

    class Command(LightningCLI):
        """Says in few lines what its parser refuses."""

        @staticmethod
        def subcommands() -> dict[str, set[str]]:
            """The one that is asked for: to make the parsers of the others takes longer than to read the words."""
            known = LightningCLI.subcommands()
            return {name: known[name] for name in arguments[:1] if name in known} or known

        def init_parser(self, **kwargs: Any) -> Any:
            parser = super().init_parser(**kwargs)
            # LightningCLI 2.6.0 has no argument for the parser's class.
            parser.error = partial(_refuse, str(arguments[0]))  # type: ignore[method-assign]
            return parser

    class WithoutTrainer(Command):
        """Makes no Trainer, which would look for the devices, and runs nothing."""

        def instantiate_trainer(self, **kwargs: Any) -> Any:
            return None

        def _run_subcommand(self, subcommand: str) -> None:
            pass

    kind = Command if start else WithoutTrainer
    return kind(
        L.LightningModule,
        L.LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        trainer_defaults={"log_every_n_steps": 1, "callbacks": [MemoryCheck(), Throughput()]},
        save_config_kwargs={"overwrite": True},
        seed_everything_default=0,
        auto_configure_optimizers=False,
        args=list(arguments),
    )


def _refuse(command: str, message: str, ex: Exception | None = None) -> NoReturn:
    """Print what LightningCLI's parser complains about in a few lines, in place of its usage."""
    print_error(command, f"{of_parser(message)}\n  see: rlhfkit {command} --help")
    raise SystemExit(2) from ex


if __name__ == "__main__":
    main()
