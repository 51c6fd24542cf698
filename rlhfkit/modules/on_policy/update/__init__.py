"""What modules do with one micro-batch of an update: old log-probs, weights and filters of tokens, entropy control.

May import: models, losses, data, protocols; not the modules above, no engines or callbacks.
Start at :class:`rlhfkit.modules.on_policy.update.token_filter.TokenFilter`.
"""
