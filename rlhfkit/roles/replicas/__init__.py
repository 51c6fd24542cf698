"""Replicas of several ranks; what replicas are sent besides rows, what they read, and which rows were asked for early.

May import: data, models, the engines' weight sync, distributed, protocols, Lightning.
Start at :mod:`rlhfkit.roles.replicas.sharded`.
"""
