"""Training ranks as Ray actors, with the Trainer in the driver: scripts, notebooks and jobs on a cluster.

May import: ``strategies.deepspeed.zero3``, and Ray, when used; nothing else of rlhfkit.
Start at :mod:`rlhfkit.strategies.ray.launcher`; ``ranks.py`` is the driver's side of them, ``rank.py`` theirs.
"""
