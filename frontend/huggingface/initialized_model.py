"""The class that :func:`shardwright.initialize` gives to a model: what the model was, with another
``forward`` and with what a parallel model can do besides.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardwright.frontend.huggingface.caches import has_known_cache, renew
from shardwright.frontend.huggingface.calls import CACHE, Call, given_arguments
from shardwright.frontend.huggingface.model_folders import save_merged
from shardwright.frontend.huggingface.model_programs import Programs, place_in
from shardwright.frontend.huggingface.parallel_folders import ParallelFolders
from shardwright.runtime.errors import UsageError, brief
from shardwright.runtime.module.call_checks import check_parameters, compare_inputs
from shardwright.runtime.module.compiled import PROGRAM
from shardwright.runtime.module.declarations import DeclaredParameter
from shardwright.runtime.module.parallel_module import ParallelModule
from shardwright.runtime.module.wrappers import check_settings
from shardwright.runtime.ranks.threads import ThreadWorld
from shardwright.runtime.structure import flatten
from shardwright.runtime.training.own_sums import note_gradients

CALLS = "_shardwright_calls"
"""The attribute of a model that has its :class:`Calls`."""


class Calls:
    """Runs calls of a model, or of its encoder, by the program for their kind."""

    def __init__(self, model: nn.Module, programs: Programs) -> None:
        self.programs = programs
        self._signatures = {"": inspect.signature(model.forward)}
        self._parameters = []
        for declared in programs.main.declarations:
            # A tied parameter has several names, and so several places in the model.
            for name in declared.names if declared.kind == "parameter" else ():
                place, parameter = place_in(model, name), parameter_of(model, declared.name)
                self._parameters.append(DeclaredParameter(place, parameter, declared.requires_grad))

    def add(self, path: str, module: nn.Module) -> None:
        """Let the submodule at ``path`` be called by itself, too."""
        self._signatures[path] = inspect.signature(module.forward)
        module.__dict__["forward"] = SubmoduleForward(self, module, path)

    def run(
        self, model: nn.Module, path: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """The result of ``forward`` of the submodule at ``path`` of the model, or of the model."""
        main = self.programs.main
        with main.ranks.world.telling_errors():
            arguments = given_arguments(self._signatures[path], args, kwargs)
            settings = self.programs.settings
            call = Call.of(
                model,
                arguments,
                main.device,
                settings.config,
                names_dims=settings.names_dims,
                heads=self.programs.heads if arguments.get(CACHE) is not None else {},
            )
            program = self.programs.get(path, call)
            trains = torch.is_grad_enabled() and not settings.config.inference_only
            if trains:
                if not path:
                    check_parameters(model, self._parameters)
                self._note_gradients(model, path)
            # ``train()`` and ``eval()`` are called on the model; programs follow.
            if main.training != model.training:
                main.train(model.training)
        result = main.call_program(program, (), arguments)
        if arguments.get(CACHE) is not None:
            result = renew(arguments[CACHE], result)
            self.programs.note_heads(program, arguments[CACHE])
        if trains and main.is_summed_elsewhere and not path and not _is_inside_ddp(model):
            _refuse_backward(result, type(model).__name__)
        return result

    def _note_gradients(self, model: nn.Module, path: str) -> None:
        main = self.programs.main
        if path or (main.reducer is not None and main.reducer.is_attached):
            return
        if main.is_summed_elsewhere or main.ranks.num_units == 1:
            check_settings(main, "an optimizer of torch.optim")
            note_gradients(model)


class SubmoduleForward:
    """``forward`` of a submodule that has programs of its own."""

    def __init__(self, calls: Calls, module: nn.Module, path: str) -> None:
        self._calls = calls
        self._module = module
        self._path = path
        self.__signature__ = inspect.signature(module.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._calls.run(self._module, self._path, args, kwargs)


class InitializedModel(ParallelFolders, nn.Module):
    """What a model of transformers is besides, once it was initialized.

    ``parallel_module``: the compiled program that trains, for functions that take a
    :class:`shardwright.ParallelModule`. ``mpu``: the roles of this rank.
    """

    config: Any

    @property
    def parallel_module(self) -> ParallelModule:
        """The program that was compiled first. It has the model's parameters."""
        program: ParallelModule = self.__dict__[PROGRAM]
        return program

    @property
    def mpu(self) -> Any:
        """The roles of this rank, and their process groups."""
        return self.parallel_module.mpu

    def num_parameters(self, *args: Any, **kwargs: Any) -> int:
        """The parameters of the whole model. This rank's are ``sum(p.numel() for p in
        model.parameters())``.
        """
        calls: Calls = self.__dict__[CALLS]
        twin: Any = calls.programs.twin
        return int(twin.num_parameters(*args, **kwargs))

    def _saved(self) -> tuple[nn.Module, Any]:
        return self, self

    def _save_merged(
        self, directory: Path, *, save_config: bool, max_file_bytes: int | None
    ) -> None:
        save_merged(self, directory, save_config=save_config, max_file_bytes=max_file_bytes)

    @torch.no_grad()
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate tokens: those that the original model would.

        The prompt has a program, and the next token another one, on the parameters there are. Each
        rank keeps the cache of its own heads and samples. The ranks that share a model pass the
        same inputs, and draw what the first of them draws.

        Raises :class:`UsageError` for options that need another cache, or that may let ranks stop
        at different tokens.
        """
        calls: Calls = self.__dict__[CALLS]
        with calls.programs.main.ranks.world.telling_errors():
            for name, why in _NOT_IN_GENERATE.items():
                if kwargs.get(name):
                    raise UsageError(
                        f"generate cannot be given {name}={brief(kwargs[name])}",
                        why=why,
                        hint=f"leave out {name}",
                    )
            self._check_draws(kwargs)
            self._agree(args, kwargs)
        main = calls.programs.main
        if main.zero > 1 and not isinstance(main.ranks.world, ThreadWorld):
            # Units gather weights together, so one that has all its tokens runs on with the others.
            kwargs["synced_gpus"] = True
        generate: Callable[..., Any] = super().generate  # type: ignore[misc]
        if not self._may_cache(args, kwargs):
            kwargs = {**kwargs, "use_cache": False}
        return generate(*args, **kwargs)

    def _may_cache(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether keys and values can be kept from token to token. Where samples are dealt out,
        beams would move them between ranks, and each rank must have one at least.
        """
        if not has_known_cache(self):
            return False
        calls: Calls = self.__dict__[CALLS]
        if not calls.programs.settings.may_cut_batch:
            return True
        config = kwargs.get("generation_config") or getattr(self, "generation_config", None)
        given = [*args[:1], *kwargs.values()]
        batch = next((x.shape[0] for x in given if isinstance(x, Tensor) and x.ndim), 1)
        ranks = self.parallel_module.ranks.mesh.size
        beams = kwargs.get("num_beams", getattr(config, "num_beams", None)) or 1
        return beams == 1 and batch >= ranks

    def _check_draws(self, kwargs: Mapping[str, Any]) -> None:
        """Refuse to draw tokens where ranks are threads: all would draw from one generator, in
        turns.
        """
        config = kwargs.get("generation_config") or getattr(self, "generation_config", None)
        draws = kwargs.get("do_sample", getattr(config, "do_sample", False))
        ranks = self.parallel_module.ranks
        if draws and ranks.mesh.size > 1 and isinstance(ranks.world, ThreadWorld):
            raise UsageError(
                "generate cannot draw tokens where ranks are threads of one process",
                why="they share torch's generator, and each would draw other tokens",
                hint="do_sample=False, or run the ranks as processes under torchrun",
            )

    def _agree(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Compare the inputs of the ranks that share the model, and let them draw alike."""
        program = self.parallel_module
        ranks = program.ranks
        unit = ranks.group(ranks.mesh.names)
        if unit.size == 1:
            return
        leaves = flatten({"args": list(args), "kwargs": dict(kwargs)})
        tensors = {path: leaf for path, leaf in leaves.items() if isinstance(leaf, Tensor)}
        compare_inputs(type(self).__name__, tensors, unit, ranks.num_units)
        device = program.device
        # The ranks of a unit must draw the same tokens, or each would go on with a text of its own.
        torch.set_rng_state(unit.broadcast(torch.get_rng_state().to(device), 0).cpu())
        if device.type == "cuda":
            state = torch.cuda.get_rng_state(device).to(device)
            torch.cuda.set_rng_state(unit.broadcast(state, 0).cpu(), device)

    # The state of this rank, with layouts

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state of this rank: pieces under the original names, and how they are cut."""
        return self.parallel_module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load what this rank's :meth:`state_dict` gave. Raises :class:`CheckpointError` for that
        of another rank, or of the original model.
        """
        return self.parallel_module.load_state_dict(*args, **kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move the programs with the model. Raises :class:`UsageError` for another dtype."""
        calls: Calls = self.__dict__[CALLS]
        calls.programs.main._apply(fn)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        calls.programs.join_buffers(self)
        return self


def refusal(name: str, why: str, hint: str) -> Callable[..., Any]:
    """A method called ``name`` that raises :class:`UsageError`."""

    def refused(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        raise UsageError(
            f"{type(self).__name__}.{name}() is not for an initialized model", why=why, hint=hint
        )

    refused.__name__ = name
    refused.__doc__ = f"Refused: {why}."
    return refused


_BEFORE = "call it before shardwright.initialize"
_PIECES = "every rank has pieces of its own"

REFUSED: Mapping[str, tuple[str, str]] = {
    "save_pretrained": (
        _PIECES,
        "model.save_parallelized(directory, merge_checkpoints=True) leaves what from_pretrained "
        "reads",
    ),
    "push_to_hub": (
        _PIECES,
        "model.save_parallelized(directory, merge_checkpoints=True), then on one rank "
        "huggingface_hub.HfApi().upload_folder(folder_path=directory, repo_id=...)",
    ),
    "resize_token_embeddings": (_PIECES, _BEFORE),
    "tie_weights": ("the programs are compiled for the tensors there are", _BEFORE),
    "init_weights": (_PIECES, _BEFORE),
    "add_adapter": ("the programs are compiled without the adapter", _BEFORE),
    "load_adapter": ("the programs are compiled without the adapter", _BEFORE),
    "gradient_checkpointing_enable": ("the programs are compiled without it", _BEFORE),
    "gradient_checkpointing_disable": ("the programs are compiled with what there was", _BEFORE),
    "set_attn_implementation": ("the programs are compiled with the one there was", _BEFORE),
}
"""Methods of transformers that would do nothing here, or harm: why, and what to do instead."""

_NOT_IN_GENERATE: Mapping[str, str] = {
    "cache_implementation": "programs keep the cache that grows with every token alone",
    "assistant_model": "how many candidates are kept differs from token to token",
    "prompt_lookup_num_tokens": "how many candidates are kept differs from token to token",
    "max_time": "each rank looks at its own clock, and would stop at another token",
    "synced_gpus": "units of ranks generate each for itself",
}


MAKERS = ("from_pretrained", "from_config", "_from_config")
"""Class methods that make a model."""


def _maker(cls: type[nn.Module], name: str) -> classmethod[Any, Any, Any]:
    """The class method of ``cls``, which makes a model of ``cls``."""
    make = getattr(cls, name)

    @functools.wraps(make)
    def made(_: type, *args: Any, **kwargs: Any) -> Any:
        return make(*args, **kwargs)

    return classmethod(made)


def _not_pickled(self: nn.Module, _: Any) -> Any:
    """Refuse ``pickle``, and ``torch.save`` and ``copy.deepcopy``, which go the same way."""
    raise UsageError(
        f"a {type(self).__name__} cannot be pickled or copied once it is initialized",
        why=f"{_PIECES}, and programs that are compiled for its ranks",
        hint="model.save_parallelized(directory) saves it, with merge_checkpoints=True as "
        "from_pretrained reads it; a copy is made before shardwright.initialize",
    )


@functools.cache
def initialized_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class of an initialized model of class ``cls``, under the same name."""

    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls: Calls = self.__dict__[CALLS]
        return calls.run(self, "", args, kwargs)

    # ``save_pretrained`` and its kin would write one rank's pieces as the whole: refused in words.
    methods = {
        name: refusal(name, why, hint)
        for name, (why, hint) in REFUSED.items()
        if hasattr(cls, name)
    }
    # New models of this class are those of the user's: nothing about them is initialized.
    makers = {name: _maker(cls, name) for name in MAKERS if hasattr(cls, name)}
    members = {
        "forward": forward,
        "__reduce_ex__": _not_pickled,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        **methods,
        **makers,
    }
    return type(cls.__name__, (InitializedModel, cls), members)


def parameter_of(model: nn.Module, name: str) -> nn.Parameter:
    """A parameter of the user's model."""
    scope, leaf = place_in(model, name)
    parameter = scope._parameters[leaf]
    assert parameter is not None
    return parameter


def guard_submodules(model: nn.Module, callable_paths: tuple[str, ...]) -> None:
    """Refuse calls of submodules that hold pieces, but for those that have programs of their
    own.
    """
    for path, module in model.named_modules():
        if path and path not in callable_paths and next(module.parameters(), None) is not None:
            module.register_forward_pre_hook(_refuse_call, with_kwargs=True)


def _refuse_call(module: nn.Module, args: Any, kwargs: Any) -> None:
    raise UsageError(
        f"a {type(module).__name__} of an initialized model cannot be called by itself",
        why="it holds this rank's pieces, and the model's program computes what it did",
        hint="call the model; ask it for output_hidden_states=True to see what is between",
    )


def _is_inside_ddp(model: nn.Module) -> bool:
    active: Any = DistributedDataParallel._active_ddp_module
    return active is not None and any(part is model for part in active.modules())


def _refuse_backward(result: Any, title: str) -> None:
    """Refuse a backward of a call that went past ``DistributedDataParallel``, which would not sum
    its gradients.
    """

    # Raised in backward, not in the call: what is only evaluated needs no gradients summed.
    def refuse(gradient: Tensor) -> None:
        raise UsageError(
            f"backward of a call of {title} that DistributedDataParallel has not seen",
            why="the model is wrapped, and was called itself: nobody would average these gradients",
            hint="call what DistributedDataParallel returned, engine(**batch)",
        )

    for leaf in flatten(result).values():
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            leaf.register_hook(refuse)  # type: ignore[no-untyped-call]
