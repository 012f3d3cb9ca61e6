"""Models of transformers, trained, saved and asked for text as OSLO's users do it."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import initialized
import pytest
import torch
import transformers
from initialized import batch, make, on_one_device, parallel, sgd, tensor_parallel, train
from parity import assert_close_tree
from precision import float64_casts
from safetensors import safe_open
from torch import Tensor

import shardwright
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.ranks.world import current_world


@pytest.mark.slow
def test_a_killed_run_goes_on_and_ends_as_one_device(tmp_path: Path) -> None:
    """tests/product/initialized.py does so with every family."""
    initialized.check_family("gpt2", tmp_path)


@pytest.mark.slow
def test_replicas_hold_pieces_and_generate_together(tmp_path: Path) -> None:
    initialized.check_pieces_over_replicas(tmp_path)


OTHER_PLANS = {
    "data": {"pas_policy": "data"},
    "sequence": {"pas_config": {"sequence_parallel": True}},
}
"""Plans that would leave summands of gradients behind, if parameters were stored as they like."""


def train_with(rank: int, folder: Path, config: dict[str, Any]) -> list[float]:
    with float64_casts():
        model = make("gpt2")
        optimizer = sgd(model)
        shardwright.initialize(model, tensor_parallel(2, **config), gen_savedir=folder)
        return train(model, model, optimizer, "gpt2", range(3), slice(None))


@pytest.mark.slow
@pytest.mark.parametrize("plan", OTHER_PLANS)
def test_an_ordinary_optimizer_follows_whole_gradients(plan: str, tmp_path: Path) -> None:
    losses, _ = on_one_device("gpt2", 3)
    for found in run_ranks(2, train_with, tmp_path, OTHER_PLANS[plan]):
        assert_close_tree(torch.tensor(found), torch.tensor(losses), "losses")


AUTODIST = {
    "pas_policy": "autodist",
    "pas_config": {
        "mesh": {"tp": 2},
        "stored": {
            "transformer.wte.weight": "[101/tp, 16]",
            "transformer.h.0.mlp.c_fc.weight": "[16, 64/tp]",
        },
    },
}


def search_and_train(rank: int, folder: Path) -> tuple[list[float], Tensor]:
    with float64_casts():
        model = make("gpt2")
        optimizer = sgd(model)
        # Batch and sequence of one size; both vary all the same.
        example = {name: torch.zeros_like(x) for name, x in batch("gpt2", 3, 8).items()}
        config = tensor_parallel(2, **AUTODIST)
        shardwright.initialize(model, config, gen_savedir=folder, dummy_forward_args=example)
        losses = train(model, model, optimizer, "gpt2", range(2), slice(None))
        settings = {"do_sample": False, "max_new_tokens": 3}
        return losses, model.eval().generate(**initialized.prompt("gpt2"), **settings)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:each rank of GPT2LMHeadModel does much more than its part")
def test_plans_are_searched_for_every_kind_of_call(tmp_path: Path) -> None:
    """Programs of a searched mesh that store tensors as the first one does."""
    losses, reference = on_one_device("gpt2", 2)
    with float64_casts():
        reference.eval()
        expected = reference.generate(
            **initialized.prompt("gpt2"), do_sample=False, max_new_tokens=3
        )
    for found, tokens in run_ranks(2, search_and_train, tmp_path):
        assert_close_tree(torch.tensor(found), torch.tensor(losses), "losses")
        assert torch.equal(tokens, expected)
    plans = [json.loads(file.read_text()) for file in tmp_path.rglob("plan.json")]
    assert [plan["mesh"] for plan in plans] == [{"tp": 2}] * 3
    cut = [plan["stored"]["transformer.wte.weight"] for plan in plans]
    assert cut == ["[101/tp, 16]"] * 3


def generate_with(rank: int, folder: Path, name: str, config: dict[str, Any]) -> Any:
    """Greedy tokens, tokens of beams, and logits with a cache of the caller's own."""
    with float64_casts():
        return generate_in_float64(folder, name, config)


def generate_in_float64(folder: Path, name: str, config: dict[str, Any]) -> Any:
    model = make(name).eval()
    shardwright.initialize(model, {"plan_ngpus": 2, **config}, gen_savedir=folder)
    found = generated(model, name)
    if name != "t5":
        mine = transformers.DynamicCache(config=model.config)
        ids = initialized.prompt(name)["input_ids"]
        with torch.no_grad():
            logits = [model(input_ids=ids[:, :3], past_key_values=mine).logits]
            result = model(input_ids=ids[:, 3:], past_key_values=mine)
        assert result.past_key_values is mine and mine.get_seq_length() == 4
        found.append(torch.cat((*logits, result.logits), 1))
    own = {id(one) for one in model.parameters()}
    programs = model.parallel_module.programs().all
    assert len(programs) > 1
    assert all(id(one) in own for program in programs for one in program.parameters())
    return found


def generated(model: Any, name: str) -> list[Tensor]:
    settings = {"do_sample": False, "max_new_tokens": 5}
    return [model.generate(**initialized.prompt(name), **settings, num_beams=n) for n in (1, 2)]


GENERATING = [
    ("llama", {}),
    ("gpt2", {"pas_policy": "cp"}),
    ("t5", {}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "config"), GENERATING, ids=str)
def test_tokens_are_those_of_one_device(name: str, config: dict[str, Any], tmp_path: Path) -> None:
    """Tokens and logits with a cache that the plan cuts, on the parameters that are trained."""
    model = make(name).eval()
    with float64_casts(), torch.no_grad():
        expected = generated(model, name)
        if name != "t5":
            expected.append(model(input_ids=initialized.prompt(name)["input_ids"]).logits)
    for found in run_ranks(2, generate_with, tmp_path, name, config):
        assert_close_tree(dict(enumerate(found)), dict(enumerate(expected)))


def save_uneven(rank: int, folder: Path) -> list[float]:
    with float64_casts():
        model, optimizer = parallel(4, folder / "gen", "gpt2", vocab_size=50257)
        losses = train(model, model, optimizer, "gpt2", range(2), slice(None))
        model.save_parallelized(folder / "pieces")
        model.save_parallelized(folder / "merged", merge_checkpoints=True)
    return losses


def load_on_two(rank: int, folder: Path) -> list[str]:
    model, _ = parallel(2, folder / "gen", "gpt2", vocab_size=50257, seed=1)
    assert initialized.differing_pieces(model, str(folder))
    model.from_parallelized(folder / "pieces")
    return initialized.differing_pieces(model, str(folder))


def load_from_meta(rank: int, folder: Path) -> tuple[list[str], bool]:
    """Pieces read from the merged folder, into parameters that an optimizer has already."""
    config = transformers.AutoConfig.from_pretrained(folder / "merged")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    optimizer = sgd(model)
    config = tensor_parallel(3)
    other = folder / "other"
    if rank == 0:
        make("gpt2", vocab_size=50).save_pretrained(other)
    current_world().barrier()
    told = report_of(
        lambda: shardwright.initialize(model, config, gen_savedir=folder / "gen", checkpoint=other)
    )
    assert "'transformer.wte.weight' is [50, 16] there and [50257, 16] here" in told
    shardwright.initialize(model, config, gen_savedir=folder / "gen")
    differing = initialized.differing_pieces(model, str(folder))
    before = model.transformer.wte.weight.detach().clone()
    train(model, model, optimizer, "gpt2", range(1), slice(None))
    return differing, not torch.equal(before, model.transformer.wte.weight)


@pytest.mark.slow
def test_sizes_that_do_not_divide_move_between_numbers_of_ranks(tmp_path: Path) -> None:
    losses, reference = on_one_device("gpt2", 2, vocab_size=50257)
    for found in run_ranks(4, save_uneven, tmp_path):
        assert_close_tree(torch.tensor(found), torch.tensor(losses), "losses")
    merged = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "merged")
    assert_close_tree(
        dict(merged.named_parameters()), dict(reference.named_parameters()), "parameters"
    )
    assert run_ranks(2, load_on_two, tmp_path) == [[], []]
    assert run_ranks(3, load_from_meta, tmp_path) == [([], True)] * 3


# What follows is one job of two ranks: a trace of a transformer takes longer than all of it.


def report_of(action: Any) -> str:
    """The error of an action in words, with its class."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def job(rank: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with float64_casts():
        model = make("gpt2")
        whole = {name: one.clone() for name, one in model.named_parameters()}
        found["graph"] = report_of(lambda: shardwright.initialize(model, tensor_parallel(2)))
        searched = tensor_parallel(2, pas_policy="autodist")
        whole = {name: one.detach() for name, one in whole.items()}
        optimizer, objects = sgd(model), [id(one) for one in model.parameters()]
        found["sizes"] = report_of(lambda: shardwright.initialize(model, searched))
        config = tensor_parallel(2, runtime_ngpus=2)
        assert shardwright.initialize(model, config, gen_savedir=folder / "gen") is model
        found["same objects"] = objects == [id(one) for one in model.parameters()]
        found["shape"] = tuple(model.transformer.wte.weight.shape)
        found["class"] = type(model).__name__, isinstance(model, transformers.GPT2LMHeadModel)
        found["tied"] = model.lm_head.weight is model.transformer.wte.weight
        found["losses"] = train(model, model, optimizer, "gpt2", range(2), slice(None))
        model.save_parallelized(folder / "pieces", optimizer=optimizer, step=2)
        model.save_parallelized(folder / "merged", merge_checkpoints=True)
        found["differing"] = initialized.differing_pieces(model, str(folder))
        for parameter in model.parameters():
            parameter.data.zero_()
        model.from_parallelized(folder / "pieces")
        found["loaded"] = initialized.differing_pieces(model, str(folder))
    fresh = initialized.loaded(type(model), folder / "merged")
    assert type(fresh) is transformers.GPT2LMHeadModel, (
        "what its class makes is a model like any other"
    )
    found["errors"] = errors_of(model, folder)
    found["errors"]["stepped"] = report_of(lambda: sgd_that_stepped(whole, model).step())
    return found


def errors_of(model: Any, folder: Path) -> dict[str, str]:
    ids = torch.zeros(1, 3, dtype=torch.int64)
    file, broken = folder / "file", folder / "broken"
    file.touch()
    copied = shutil.copytree(folder / "pieces", broken, dirs_exist_ok=True)
    next(copied.glob("*/rank-00001.safetensors")).unlink(missing_ok=True)
    actions = {
        "second": lambda: shardwright.initialize(model, tensor_parallel(2)),
        "save_pretrained": lambda: model.save_pretrained(folder / "no"),
        "dtype": lambda: model.half(),
        "submodule": lambda: model.transformer(ids),
        "cache": lambda: model.generate(ids, cache_implementation="static"),
        "draws": lambda: model.generate(ids, do_sample=True),
        "option": lambda: model.save_parallelized(folder / "no", what=1),
        "state": lambda: model.save_parallelized(folder / "no", merge_checkpoints=True, step=1),
        "missing": lambda: model.from_parallelized(broken),
        "no folder": lambda: model.from_parallelized(file),
        "file": lambda: model.save_parallelized(file),
        "merged into a file": lambda: model.save_parallelized(file, merge_checkpoints=True),
        "copied": lambda: copy.deepcopy(model),
        "merged": lambda: model.from_parallelized(folder / "merged"),
        "whole state": lambda: model.load_state_dict(make("gpt2").state_dict()),
    }
    return {name: report_of(action) for name, action in actions.items()}


def sgd_that_stepped(whole: dict[str, Tensor], model: Any) -> torch.optim.Optimizer:
    """An optimizer of the model that has state for whole parameters."""
    optimizer = sgd(model)
    for name, parameter in model.named_parameters():
        optimizer.state[parameter]["momentum_buffer"] = whole[name]
    return optimizer


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    folder = tmp_path_factory.mktemp("initialized")
    # Beforehand, without a job; the job finds the files.
    config = tensor_parallel(2, runtime_ngpus=2)
    with float64_casts():
        made = shardwright.initialize(
            make("gpt2"), config, gen_savedir=folder / "gen", load_module=False
        )
    assert made is None
    before = {file: file.stat().st_mtime_ns for file in (folder / "gen").rglob("gencode*.py")}
    ranks = run_ranks(2, job, folder)
    after = {file: file.stat().st_mtime_ns for file in (folder / "gen").rglob("gencode*.py")}
    assert len(before) == 2 and after == before
    return ranks, folder


def test_a_model_is_cut_in_place_and_trains_as_on_one_device(run: Any) -> None:
    ranks, folder = run
    losses, reference = on_one_device("gpt2", 2)
    for rank, found in enumerate(ranks):
        assert found["same objects"] and found["tied"]
        assert found["shape"] == (51 - rank, 16)  # 101 tokens on two ranks
        assert found["graph"].startswith(
            "UsageError: parameter 'transformer.wte.weight' is part of a graph that something holds"
        )
        assert found["sizes"].startswith(
            "ConfigError: policy 'autodist' needs dummy_forward_args\n"
        )
        assert found["class"] == ("GPT2LMHeadModel", True)
        assert_close_tree(torch.tensor(found["losses"]), torch.tensor(losses), "losses")
    merged = transformers.GPT2LMHeadModel.from_pretrained(folder / "merged")
    assert_close_tree(
        dict(merged.named_parameters()), dict(reference.named_parameters()), "parameters"
    )


def test_merged_folders_are_what_save_pretrained_leaves(run: Any, tmp_path: Path) -> None:
    ranks, folder = run
    assert [found["differing"] for found in ranks] == [[], []]
    assert [found["loaded"] for found in ranks] == [[], []]
    make("gpt2").save_pretrained(tmp_path)
    theirs, ours = (
        {file.name: file for file in place.iterdir()} for place in (tmp_path, folder / "merged")
    )
    assert ours.keys() == theirs.keys()
    for name in ("config.json", "generation_config.json"):
        assert ours[name].read_text() == theirs[name].read_text()
    names = ours["model.safetensors"], theirs["model.safetensors"]
    with safe_open(names[0], "pt") as one, safe_open(names[1], "pt") as other:
        assert set(one.keys()) == set(other.keys())
        assert one.metadata() == other.metadata()
    pieces = {file.name for file in (folder / "pieces").rglob("*")}
    assert {"config.json", "rank-00000.safetensors", "rank-00001.safetensors"} <= pieces


ERRORS = {
    "second": "UsageError: this GPT2LMHeadModel was initialized already\n"
    "  why:   its parameters are this rank's pieces, and cannot be cut again\n"
    "  try:   use the model as it is, or make a new one for another config",
    "save_pretrained": "UsageError: GPT2LMHeadModel.save_pretrained() is not for an initialized "
    "model\n"
    "  why:   every rank has pieces of its own\n"
    "  try:   model.save_parallelized(directory, merge_checkpoints=True) leaves what "
    "from_pretrained reads",
    "submodule": "UsageError: a GPT2Model of an initialized model cannot be called by itself\n"
    "  why:   it holds this rank's pieces, and the model's program computes what it did\n"
    "  try:   call the model; ask it for output_hidden_states=True to see what is between",
    "cache": "UsageError: generate cannot be given cache_implementation='static'\n"
    "  why:   programs keep the cache that grows with every token alone\n"
    "  try:   leave out cache_implementation",
    "draws": "UsageError: generate cannot draw tokens where ranks are threads of one process\n"
    "  why:   they share torch's generator, and each would draw other tokens\n"
    "  try:   do_sample=False, or run the ranks as processes under torchrun",
    "option": "ConfigError: save_parallelized has no option 'what'\n"
    "  try:   save_config, merge_checkpoints, max_file_bytes, optimizer, scheduler, loader, step, "
    "extra",
    "state": "ConfigError: a merged folder has no step\n"
    "  why:   from_pretrained reads a model and nothing else\n"
    "  try:   save it with pieces: save_parallelized(another folder, ...)",
    "missing": "MissingFileError: FOLDER/broken/000001-step-2 lacks rank-00001.safetensors\n"
    "  why:   2 files hold the pieces of the model, and 1 of them are not there\n"
    "  try:   copy the folder as a whole, from all nodes that saved",
    "no folder": "CheckpointError: FOLDER/file is not a folder\n"
    "  why:   a file lies there, and save_parallelized makes a folder\n"
    "  try:   pass the folder that save_parallelized was given",
    "file": "FileError: FOLDER/file is not a folder\n"
    "  why:   a file lies there, and the model is saved into a folder\n"
    "  try:   name another one, or delete the file",
    "merged": "CheckpointError: FOLDER/merged holds a merged model, not its pieces\n"
    "  why:   save_parallelized(..., merge_checkpoints=True) left it for from_pretrained\n"
    "  try:   from_pretrained before shardwright.initialize, or a folder that was saved without "
    "merge_checkpoints",
    "copied": "UsageError: a GPT2LMHeadModel cannot be pickled or copied once it is initialized\n"
    "  why:   every rank has pieces of its own, and programs that are compiled for its ranks\n"
    "  try:   model.save_parallelized(directory) saves it, with merge_checkpoints=True as "
    "from_pretrained reads it; a copy is made before shardwright.initialize",
    "merged into a file": "FileError: FOLDER/file is not a folder\n"
    "  why:   a file lies there, and the model is saved into a folder\n"
    "  try:   name another one, or delete the file",
}


def test_what_cannot_be_done_is_said_on_all_ranks(run: Any) -> None:
    ranks, folder = run
    for found in ranks:
        errors = {
            name: text.replace(str(folder), "FOLDER") for name, text in found["errors"].items()
        }
        assert {name: errors[name] for name in ERRORS} == ERRORS
        assert errors["dtype"].startswith(
            "UsageError: the parallel module GPT2LMHeadModel cannot be converted from float64 to "
            "float16\n"
        )
        assert errors["whole state"].startswith(
            "CheckpointError: the state dict has no layouts for GPT2LMHeadModel\n"
        )
        assert errors["stepped"].startswith(
            "UsageError: SGD has stepped before GPT2LMHeadModel was made parallel\n"
            "  why:   its 'momentum_buffer' of 'transformer.wte.weight' is [101, 16], and this "
        )
