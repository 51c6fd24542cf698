"""What ``rlhfkit <command>`` runs besides Lightning's own commands: one file and one function each.

The function's arguments are the command's options and its docstring is their help; it works as well from Python.
"""
