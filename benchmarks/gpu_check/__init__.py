"""``python -m benchmarks.gpu_check`` (``make gpu-check``): what only a GPU can show, as one command with one report.

``check.py`` says what a check is, ``runner.py`` runs all of them in processes with time limits, ``report.py`` writes
what came out. The checks are in ``correctness/`` (a figure above its bound fails the command) and ``measurements/``
(figures without a bound). They need torch and Transformers, no network, and skip what is not installed with its reason.
"""
