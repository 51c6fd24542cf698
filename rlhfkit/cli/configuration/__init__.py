"""What a configuration of ``rlhfkit fit`` says, checked by reading source files: no library is imported for it.

May import: ``argument_names.py``, ``validation.py``; nothing that loads torch or Lightning.
Start at :mod:`rlhfkit.cli.configuration.check`.
"""
