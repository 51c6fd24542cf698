"""Learning from given answers: supervised fine-tuning (also dynamic: DFT) and distillation from a frozen teacher.

May import: modules' own ground (``base.py``, ``functions.py`` ...), models, data, losses.
Start at :mod:`rlhfkit.modules.supervised.sft`; the teacher and its cache serve distillation.
"""
