"""Checks between two processes: handles to GPU memory, NCCL, and transfers of weights."""
