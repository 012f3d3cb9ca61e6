"""The distributed optimizer: optimizer state split over the ranks that hold copies of a parameter
(ZeRO stages 1 and 2), and at every stage the precision in which it is kept.

- ``settings`` says what the user asked for, and ``build`` puts everything together.
- ``copy_groups`` deals these ranks into groups.
- ``update_split`` says which part of a bucket each rank of a group updates.
- ``shards`` makes the tensors that the user's optimizer sees of that part.
- ``remainders`` stores a master as 16 bits beside its bfloat16 parameter.
- ``sharded_bucket`` reduces gradients to the shards; ``arena`` has room for their buffers.
- ``gathering`` brings updated parameters to all ranks; ``awaited`` lets a program read them while
  they are on their way.
- ``whole_exchange`` gives an optimizer that needs them the ``whole_tensors`` of parameters that the
  plan cuts.
- ``state`` puts masters into the optimizer's state dict.

Source of the idea: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models", section 5.
"""
