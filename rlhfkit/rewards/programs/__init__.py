"""Run and test the programs that a policy wrote, for :class:`CodeExecution`.

``evaluation.py`` tests one program from outside, ``worker.py`` and ``driver.py`` run it inside the sandbox.

May import: rewards (``base.py``, ``subprocesses.py``, ``sandbox/``), data, ``validation.py``.
Start at :mod:`rlhfkit.rewards.programs.execution`.
"""

from rlhfkit.rewards.programs.execution import CodeExecution

__all__ = ["CodeExecution"]
