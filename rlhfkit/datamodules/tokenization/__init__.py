"""From the user's files to token ids: sources, columns, chat templates, what is learned of a conversation, a cache.

May import: data and Transformers' tokenizers.
Start at :mod:`rlhfkit.datamodules.tokenization.examples`.
"""
