"""The additions of the demo, for the tutorials beside this file: see :mod:`rlhfkit.cli.demo.arithmetic`."""

from rlhfkit.cli.demo.arithmetic import HELD_OUT, LARGEST, VALIDATION, character_tokenizer, make

__all__ = ["HELD_OUT", "LARGEST", "VALIDATION", "character_tokenizer", "make"]
