"""What an iteration costs on many ranks: measured on this machine, and predicted for clusters.

``python -m benchmarks.scale`` prints how it is used. Start reading in ``simulator.py``.
"""
