"""The distributed optimizer: optimizer state split over the ranks that hold copies of a parameter
(ZeRO stages 1 and 2), and at every stage the precision in which it is kept.

:mod:`groups` deals these ranks into groups, :mod:`split` says which part of a bucket each rank of a
group updates, :mod:`shards` makes the tensors that the user's optimizer sees of it,
:mod:`remainders` halves masters among them, :mod:`bucket` reduces gradients to them,
:mod:`gathering` brings updated parameters to all ranks, :mod:`awaited` by the time somebody reads
one. Of parameters that the plan cuts, :mod:`exchange` gives optimizers that need them the whole
tensors of :mod:`wholes`. :mod:`build` puts them together, :mod:`settings` says what the user asked
for. Source of the idea: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models", section 5.
"""
