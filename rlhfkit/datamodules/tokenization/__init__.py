"""From the user's files to token ids: sources, columns, chat templates, the mask of learned tokens, a cache.

May import: ``rlhfkit.data``, ``protocols.py``; Transformers and ``datasets``, when used.
Start at :mod:`rlhfkit.datamodules.tokenization.examples`.
"""
