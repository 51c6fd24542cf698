"""Tokens of one row that fit in a fixed memory: with 1, 2 and 4 sequence ranks, Ulysses and ring.

    python benchmarks/long_context.py                       # about ten minutes on two cores
    python benchmarks/long_context.py --sizes 1 --kinds ulysses

Each run is an ``SFTModule`` under ``RLHFDeepSpeedStrategy(stage=3, sequence_parallel_size=...)`` with gradient
checkpointing and tiled MLPs, on gloo ranks that are processes of their own, training on one row per forward group.
Measured is the largest resident memory of a rank in optimizer steps after the first, over what is resident before them
(weights, optimizer state, libraries), for three lengths of the row. Memory is linear in the length; the line through
the measurements gives how many tokens fit in ``--megabytes``. Traffic is what a rank sends by collectives in one step,
but for ZeRO's, which does not grow with the length: it is measured with two lengths and divided by the difference.

Prints one line of JSON: for each kind and number of ranks the bytes a token takes on a rank, the tokens that fit, how
many times those of one rank, seconds and bytes sent per token.
"""
