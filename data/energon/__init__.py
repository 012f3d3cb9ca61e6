"""Megatron-Energon's interface: workers of all ranks share the samples, and each rank saves and
restores a state of its own.

Names, splits and seeds are Energon's. Unlike there, what a worker reads is computed: a state is the
number of batches that a rank has given out, no process keeps past states, and no global generator
moves.
"""
