"""Learning from preferences: DPO and its relatives on pairs, KTO on single answers, and the reference model they share.

May import: the files of ``modules/``, models, data, losses, and ``rollout.weight_sync`` to read weights.
Start at :mod:`rlhfkit.modules.preference.dpo`; ``modules/parts/answer_reference.py`` has their reference.
"""
