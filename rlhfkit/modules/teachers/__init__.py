"""Teachers: loading them, several by domain, ones with other tokens, and outputs that are compared.

May import: the files of ``modules/``, models, roles, data and losses.
Start at :mod:`rlhfkit.modules.teachers.text`.
"""
