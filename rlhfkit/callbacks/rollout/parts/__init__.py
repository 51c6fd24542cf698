"""Features of the rollout side, one a file; a run without a feature does not enter its file.

May import: everything that ``callbacks/rollout`` may. No file outside imports a part at its top.
"""
