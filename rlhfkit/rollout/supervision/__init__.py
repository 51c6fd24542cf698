"""Remote engine processes: started, probed, marked dead, started again; requests to those that serve.

May import: ``rollout/errors.py``, ``rollout/event_loop.py``, ``weight_sync/sender.py``, ``rank_store.py``,
``ray_session.py``, and Ray, when used.
Start at :mod:`rlhfkit.rollout.supervision.table`; ``vllm/actor.py`` has what it calls on an engine.
"""
