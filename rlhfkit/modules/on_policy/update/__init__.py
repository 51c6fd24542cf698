"""What modules do with one micro-batch of an update: old log-probs of later epochs.

May import: ``modules/base.py``, models, losses, data, protocols; not the modules above, no engines or callbacks.
Start at :class:`rlhfkit.modules.on_policy.update.first_pass.FirstPassLogprobs`.
"""
