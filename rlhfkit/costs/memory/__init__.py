"""Bytes per GPU of a run, part by part and phase by phase, and what of it does not fit.

``states.py``: weights, gradients, optimizers; ``activations.py``: of layers; ``passes.py``: of a run's forward and
backward passes; ``engines.py``: engines and samples; ``whole_run.py``: all together; ``placed.py``: models
on GPUs of their own.

May import: ``costs/hardware.py``, ``model_shape.py``, ``parallelism.py`` and ``run.py``.
Start at :func:`rlhfkit.costs.memory.whole_run.memory_parts`.
"""
