"""What reducers, optimizers and checkpoints need to know of a compiled module, without knowing how
it runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, ClassVar, Self

from torch import nn

from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import UsageError
from shardwright.runtime.layout import Mesh
from shardwright.runtime.module.declarations import Declaration, DeclaredParameter
from shardwright.runtime.module.scope import Scope
from shardwright.runtime.ops.random import RngState
from shardwright.runtime.ranks.communicator import Communicator
from shardwright.runtime.ranks.groups import RankMesh
from shardwright.runtime.training.reducer import Reducer

PROGRAM = "_shardwright_program"
"""The attribute of an ordinary module that holds its compiled one, where both have the same
parameters: :func:`shardwright.initialize` leaves the user's model where it was, and keeps the
program beside it.
"""

WRAPPER_STATE = "__composable_api_state_key"
"""How names begin under which torch's wrappers without a class keep their state in a module."""


def compiled_parts(module: nn.Module) -> dict[str, CompiledModule]:
    """The compiled parts of a module by path: submodules, and programs beside ordinary ones."""
    found: dict[str, CompiledModule] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        if isinstance(part, CompiledModule):
            found[path] = part
        elif PROGRAM in part.__dict__:
            found[path] = part.__dict__[PROGRAM]
    return found


class CompiledModule(Scope):
    """One rank's part of a compiled module, as far as its training and its state are concerned.

    ``mesh``: of a unit. ``rank``: in it. ``compute_config``: what it was compiled with.
    ``use_order``: the parameters, those of other stages too, in the order in which forward first
    uses them. The loader sets both. ``shared``: the parameters that several pipeline stages hold,
    with their stages. ``ranks``: this rank's place in its unit. ``rng``: seed, step and microbatch
    of its random numbers. ``reducer``: what sums its gradients, once there is one.
    """

    mesh: ClassVar[Mesh]
    rank: ClassVar[int]
    compute_config: ClassVar[ComputeConfig | None] = None
    use_order: ClassVar[tuple[str, ...]] = ()
    shared: ClassVar[Mapping[str, tuple[int, ...]]] = {}

    ranks: RankMesh
    rng: RngState
    reducer: Reducer | None = None
    # Whether somebody else sums gradients over the units: DistributedDataParallel around the model
    # that this is the program of.
    is_summed_elsewhere: bool = False
    _inputs_compared: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy with tensors of its own on the same process groups, for averages of weights and
        the like.

        As in every deep copy of a module parameters come without gradients. The optimizer stays
        with the original.
        """
        list(self.parameters())  # those that an optimizer still gathers arrive
        # What a wrapper such as ``fully_shard`` noted before it was refused cannot be copied.
        for part in self.modules():
            for name in [name for name in part.__dict__ if name.startswith(WRAPPER_STATE)]:
                del part.__dict__[name]
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update(
            {
                name: deepcopy(value, memo)
                for name, value in self.__dict__.items()
                if name != "reducer"
            }
        )
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refused: what is pickled would come back without the ranks it belongs to."""
        raise UsageError(
            f"{type(self).__name__} cannot be pickled",
            why="it is one rank's part of a compiled module, and holds process groups",
            hint="save its state_dict(), or all ranks together with shardwright.save_checkpoint",
        )

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the whole module; its program has one for training and one for
        evaluation.
        """
        for part in self.modules():
            part.__dict__["training"] = bool(mode)
        return self

    def leave_sums(self) -> None:
        """Somebody else sums the gradients over the units from now on."""
        raise NotImplementedError

    def expect_comparison(self) -> None:
        """Let the next call compare its arguments on the ranks of a unit, as the first one does."""
        self._inputs_compared = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters; under ZeRO those of the optimizer's shards with
        them.
        """
        if self.reducer is not None and self.reducer.is_attached:
            # The reducer may have parameters of other modules, whose gradients are not this one's
            # to clear.
            own = {id(parameter) for parameter in self.parameters()}
            if all(id(parameter) in own for parameter in self.reducer.parameters):
                self.reducer.clear(set_to_none)
                return
        super().zero_grad(set_to_none)

    @property
    def is_staged(self) -> bool:
        """Whether ranks of a unit have different parameters, as they run different stages of a
        pipeline.
        """
        return False

    @property
    def declarations(self) -> tuple[Declaration, ...]:
        """What the generated class declared, in order."""
        raise NotImplementedError

    def all_declarations(self) -> tuple[Declaration, ...]:
        """The tensors of the whole model, those of other pipeline stages too, in the original
        order.
        """
        return self.declarations

    def trained_parameters(self) -> Iterator[tuple[Declaration, nn.Parameter]]:
        """The parameters of this rank that get gradients, in order, each once."""
        raise NotImplementedError

    def own_parameters(self) -> Sequence[DeclaredParameter]:
        """The parameters, as they were when somebody put them there who may: the module itself, or
        ``load_state_dict``.
        """
        raise NotImplementedError

    def ranks_of(self, declaration: Declaration) -> RankMesh:
        """The mesh that the layout of a tensor refers to, and where on it this rank is."""
        raise NotImplementedError

    def is_copy(self, declaration: Declaration) -> bool:
        """Whether this rank holds a tensor only to use it: other ranks have the same elements,
        train them, and send them.
        """
        return False

    def copied_parameters(self) -> Iterator[nn.Parameter]:
        """The trained parameters that :meth:`is_copy` tells of: their gradients go to the ranks
        that train them.
        """
        return iter(())

    def refresh_copies(self) -> None:
        """Give the tensors that :meth:`is_copy` tells of the values that other ranks have.
        Collective.
        """

    def finish_step(self) -> None:
        """Do what follows a step of the optimizer. Collective."""
        self.refresh_copies()
        self.rng.next_step()

    def gradient_groups(self) -> dict[str, Communicator]:
        """The ranks that hold summands of each trained parameter's gradient, by its name. All of
        these ranks hold equal values of the parameter.

        Collective: it makes the groups.
        """
        raise NotImplementedError

    def is_counted(self, declaration: Declaration) -> bool:
        """Whether this rank counts its piece of a tensor, where every distinct element is counted
        once.
        """
        raise NotImplementedError
