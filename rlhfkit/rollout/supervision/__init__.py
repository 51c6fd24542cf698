"""Engine processes kept alive: started, asked whether they live, marked dead, started again.

May import: the ground of rollout (``engine.py``, ``errors.py``) and Ray, when used.
Start at :mod:`rlhfkit.rollout.supervision.manager`; ``health.py`` holds the rules as plain bookkeeping.
"""
