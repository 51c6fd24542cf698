"""How models write tool calls: parsers by name, and the one that a chat template asks for.

May import: the other files of episodes.
Start at :mod:`rlhfkit.episodes.tool_calls.call`, then ``registry.py``.
"""
