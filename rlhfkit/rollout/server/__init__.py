"""Engines over HTTP: running ``vllm serve`` processes, which this run did not start and does not end.

Start at ``connection.py``, then ``engine.py``.
"""
