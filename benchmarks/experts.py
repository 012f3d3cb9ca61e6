"""What a training step with experts on different ranks costs, beside the same layer by hand and
beside experts cut through their inner width; and how long a large model with experts compiles.

    python benchmarks/experts.py [--pairs 20] [--only ranks2] [--only memory] [--only compile]

On 2 and 4 ranks of the CPU, one thread each, gloo, float32, AdamW:

    layer    one layer of experts (Qwen3-MoE's) under ``ep`` against the layer by hand: one row for
             each token and expert, ``all_to_all_single`` there and back in an autograd function,
             and a product for each expert, or ``F.grouped_mm``
    model    a Qwen3-MoE under ``ep`` against transformers' model with layers by hand, the other
             gradients reduced by one all-reduce
    tp       the same model under ``ep`` against ``tp``, which cuts the width of every expert

Both sides live in the same processes and take turns step by step, so that load from elsewhere meets
both. A step is zero_grad, forward, backward, reduction of gradients, optimizer step. Router and
tokens are the same on both sides, and so are the losses. The batch of ``ep`` is that of all ranks:
each rank computes its part.

Memory is bytes of parameters and of the optimizer's state by rank, against experts by rank. The
compile is of the shape of Qwen3-235B-A22B for 64 ranks, weights on the meta device.
"""

from __future__ import annotations
