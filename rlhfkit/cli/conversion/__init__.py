"""``rlhfkit convert-config``: configurations of other libraries as ours, where that is exact.

May import: nothing of rlhfkit; it reads and writes plain values.
Start at :func:`rlhfkit.cli.conversion.command.convert_config`.
"""
