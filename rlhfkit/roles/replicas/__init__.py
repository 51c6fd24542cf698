"""What replicas of a frozen model are sent besides rows: weights; what they read; and rows that were asked for early.

May import: data, models, the engines' weight sync, distributed. Start at :mod:`rlhfkit.roles.replicas.early_rows`.
"""
