"""What replicas of a frozen model are sent besides rows, what they read, and which rows were asked for early.

May import: data, models, the engines' weight sync, distributed.
Start at :mod:`rlhfkit.roles.replicas.early_rows`.
"""
