"""Learning from texts: supervised fine-tuning (SFT, DFT) and distillation from a frozen teacher.

May import: the files of ``modules/``, models, data, losses.
Start at :mod:`rlhfkit.modules.supervised.sft`.
"""
