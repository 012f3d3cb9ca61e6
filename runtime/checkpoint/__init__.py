"""Checkpoints that move: saved under one plan, loaded under any other, merged for the original
module.

In memory: :mod:`merged` and :mod:`deduped`. On disk: :mod:`save` and :mod:`load`; :mod:`index` says
what a folder holds, :mod:`folders` how one becomes current, :mod:`owner` whose they are. Offline:
:mod:`merge_files`, :mod:`pretrained`.

Everything rests on one notion, the :class:`~shardwright.runtime.regions.Region`: which elements of
a whole tensor a piece holds. Pieces are stored with their regions and read by overlap, so that no
plan has to know another.
"""
