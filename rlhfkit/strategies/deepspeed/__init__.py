"""Parts of the strategy that know DeepSpeed: engines of child modules, joint steps, precision, ZeRO-3 parameters.

May import: ``distributed.py``; DeepSpeed, when used. All other parts of ``strategies`` import this room.
Start at :mod:`rlhfkit.strategies.deepspeed.engines`; :mod:`rlhfkit.strategies.strategy` puts the parts together.
"""
