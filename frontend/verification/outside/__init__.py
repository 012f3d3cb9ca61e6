"""A certificate from outside: generated files run under ``spmd_types``, a type checker for tensors
on meshes that knows nothing of this project.

Its local types are our placements under other letters. A rank with ``I`` has the whole value and
the whole gradient, with ``R`` the whole value and a summand of the gradient:

    ours    S(dim)   R   G   P
    theirs  S(dim)   I   R   P
"""
