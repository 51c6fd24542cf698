"""Training ranks as Ray actors, with the Trainer in the driver: scripts, notebooks and jobs on a cluster.

May import: ``protocols.py``, ``ray_session.py``, ``strategies.checkpoint``, ``strategies.deepspeed``; Ray, when used.
Start at :mod:`rlhfkit.strategies.ray.launcher`; ``ranks.py`` manages ranks in the driver, ``actor.py`` is a rank.
"""
