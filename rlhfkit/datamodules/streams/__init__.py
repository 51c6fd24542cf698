"""Streams: rows that are read during training, with a position of plain numbers that is saved and continued exactly.

May import: data, the files of datamodules above this folder, ``prompts/`` and ``tokenization/``.
Start at :mod:`rlhfkit.datamodules.streams.rows`, then ``examples.py`` and ``prompts.py``.
"""
