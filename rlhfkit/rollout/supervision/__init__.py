"""Remote engine processes: started, probed, marked dead, restarted.

May import: ``rollout/errors.py``, ``ray_session.py``, and Ray, when used.
Start at :mod:`rlhfkit.rollout.supervision.manager`; ``vllm/actor.py`` has what it calls on an engine.
"""
