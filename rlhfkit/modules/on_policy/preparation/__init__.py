"""What completes an iteration before its first update: rewards, penalties, log-probs, sums over rows of other ranks.

May import: ``modules/base.py``, models, roles, losses, data; not the modules above, no engines or callbacks.
Start at :class:`rlhfkit.modules.on_policy.preparation.iteration.IterationModule`.
"""
