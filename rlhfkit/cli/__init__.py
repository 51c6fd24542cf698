"""The ``rlhfkit`` command: Lightning's own subcommands, and one file with one function for each of the others.

A function's arguments are its command's options and its docstring the help; it can be called from Python too.

May import: everything.
Start at :mod:`rlhfkit.cli.main`.
"""
