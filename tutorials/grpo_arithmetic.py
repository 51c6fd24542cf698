"""The demo as a script, and its steps for the tutorials beside this file: ``rlhfkit demo`` is the same."""

import sys

from rlhfkit.cli.demo import demo_command, heldout_accuracy, quiet_trainer, supervised_start

__all__ = ["demo_command", "heldout_accuracy", "quiet_trainer", "supervised_start"]

if __name__ == "__main__":
    demo_command(sys.argv[1:])
