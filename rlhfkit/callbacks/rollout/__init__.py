"""One iteration of reinforcement learning: sync weights, collect groups, prepare, split into micro-batches, learn.

May import: rollout, rewards, models, data; never modules, strategies or datamodules, which it meets in the Trainer.
Start at :mod:`rlhfkit.callbacks.rollout.callback`.
"""
