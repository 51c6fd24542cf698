"""The ``rlhfkit`` command: Lightning's own subcommands, and one file with one function for each of ours.

The function's arguments are the command's options and its docstring is their help; it works as well from Python.

May import: everything.
Start at :mod:`rlhfkit.cli.main`.
"""
