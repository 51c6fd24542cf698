"""The additions of the demo, for the tutorials beside this file: see :func:`rlhfkit.cli.demo.make`."""

from rlhfkit.cli.demo import HELD_OUT, LARGEST, VALIDATION, character_tokenizer, make

__all__ = ["HELD_OUT", "LARGEST", "VALIDATION", "character_tokenizer", "make"]
