"""The names and the order that parameters have in the original model, whichever ranks hold them."""

from __future__ import annotations

from torch import nn

from shardwright.runtime.module.compiled import CompiledModule


def parameter_names(module: nn.Module) -> list[str]:
    """The first names of all parameters of the model in the original order, those of other pipeline
    stages too.
    """
    names: list[str] = []
    seen: set[int] = set()
    inside: tuple[str, ...] = ()
    # In the order of ``named_modules``; what lies inside of a compiled module is its own affair.
    for path, part in module.named_modules():
        if inside and path.startswith(inside):
            continue
        prefix = f"{path}." if path else ""
        # It knows the parameters of other stages, too.
        if isinstance(part, CompiledModule):
            names += [prefix + d.name for d in part.all_declarations() if d.kind == "parameter"]
            seen |= {id(parameter) for parameter in part.parameters()}
            if not path:
                break
            inside = (*inside, prefix)
        else:
            own = [
                (name, p)
                for name, p in part._parameters.items()
                if p is not None and id(p) not in seen
            ]
            names += [prefix + name for name, _ in own]
            seen |= {id(parameter) for _, parameter in own}
    return names
