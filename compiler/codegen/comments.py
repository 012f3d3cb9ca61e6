"""What the comments of generated code say of layouts, in the words of the model's dims."""

from __future__ import annotations

from shardwright.compiler.ir.dims import ModelDims
from shardwright.compiler.ir.size import Size, to_python
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.plan.program import Compute, Program, steps
from shardwright.runtime.layout import Layout


def describe(value: IRValue, layout: Layout, dims: ModelDims | None) -> str:
    """``[batch, seq, heads/tp * head_dim] P(dp)``: the dims of the model where they are known, else
    sizes.
    """
    classes = dims.values.get(value.name) if dims else None
    words = []
    for index, atoms in enumerate(layout.dims):
        names = classes[index] if classes and index < len(classes) else ()
        # The atoms of a dim are dims of the model: ``heads/tp * head_dim``.
        if dims is not None and len(names) == len(atoms):
            parts = []
            for class_index, atom in zip(names, atoms, strict=True):
                # A dim without a name of its own is told by its size.
                name = dims.classes[class_index].name
                parts.append(
                    "/".join(
                        [name if not name.startswith("dim") else _size_word(atom.size), *atom.axes]
                    )
                )
            words.append(" * ".join(parts))
        else:
            words.append(
                " * ".join("/".join([_size_word(atom.size), *atom.axes]) for atom in atoms)
            )
    marks = [f"P({', '.join(layout.partial)})"] if layout.partial else []
    marks += (
        [f"G({', '.join(layout.grad_partial)})"]
        if layout.grad_partial and value.requires_grad
        else []
    )
    return " ".join([f"[{', '.join(words)}]", *marks])


def _size_word(size: Size) -> str:
    return to_python(size).replace(" ", "")


def legend(dims: ModelDims, program: Program) -> str:
    """The sizes of the named dims that occur in comments."""
    used: dict[str, str] = {}
    for instruction in steps(program.body):
        if isinstance(instruction, Compute):
            for value in instruction.original.results:
                for dim in dims.values.get(value.name, ()):
                    for index in dim:
                        name = dims.classes[index].name
                        # A dim that nothing names would only be a number with a number behind it.
                        if not name.startswith("dim"):
                            used.setdefault(name, _size_word(dims.classes[index].size))
    return ", ".join(f"{name} {size}" for name, size in used.items())
