"""Learning from preferences: DPO and its relatives on pairs, KTO on single answers, and the reference model they share.

May import: modules' own ground (``base.py``, ``functions.py`` ...), models, data, losses.
Start at :mod:`rlhfkit.modules.preference.dpo`; ``reference.py`` says where reference log-probs come from.
"""
