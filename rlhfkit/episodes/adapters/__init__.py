"""Environments and tools made elsewhere: those with Gymnasium's interface, and those of MCP servers.

May import: the other files of episodes; ``mcp`` when used.
Start at :mod:`rlhfkit.episodes.adapters.gym`.
"""
