"""The policy behind OpenAI's chat API, for agents that are written against it.

May import: the rest of episodes, rollout, serving, data.
Start at :mod:`rlhfkit.episodes.openai.agents`; ``endpoint.py`` is the server, ``session.py`` what one agent asks.
"""
