"""Pipelines that cannot be, through the front door: the full text of what a user is told."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.frontend.parallelize import parallelize
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import ShardwrightError


class Deep(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor, target: Tensor) -> Any:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return F.mse_loss(x, target), x


class NoLoss(Deep):
    def forward(self, x: Tensor, target: Tensor) -> Any:
        return super().forward(x, target)[1]


class Recomputed(Deep):
    """A recompute region of the user's own, over the second and third layer."""

    def forward(self, x: Tensor, target: Tensor) -> Any:
        x = self.layers[0](x)
        x = torch.utils.checkpoint.checkpoint(
            lambda x: self.layers[2](torch.tanh(self.layers[1](x))), x, use_reentrant=False
        )
        return F.mse_loss(self.layers[3](x), target), x


X = {"x": torch.ones(3, 6), "target": torch.ones(3, 6)}

CASES: list[tuple[type, int, dict[str, Any], str]] = [
    (
        NoLoss,
        2,
        {},
        "the first result of the model is not a scalar loss\n"
        "  why:   its shape is (3, 6)\n"
        "  try:   end2end modules return the loss first, as transformers models do when they "
        "are given labels",
    ),
    (
        Deep,
        2,
        {"schedule": "1f1b_interleaved", "num_microbatches": 3},
        "schedule '1f1b_interleaved' with 3 microbatches on 2 ranks\n"
        "  why:   it takes 2 microbatches at a time, and 3 is not a multiple of that\n"
        "  try:   use 2 or 4 microbatches, or schedule '1f1b' or 'zb_v', which take any number",
    ),
    (
        Deep,
        2,
        {"chunks": 2},
        "schedule '1f1b' with 2 stages per rank\n"
        "  why:   it works with exactly 1\n"
        "  try:   make 2 stages for 2 ranks, or choose another schedule",
    ),
    (
        Deep,
        32,
        {},
        "the graph cannot be cut into 32 stages\n"
        "  why:   it has 12 places where a stage may begin\n"
        "  try:   ask for fewer stages",
    ),
    (
        Deep,
        2,
        {"stage_starts": ("layers.9",)},
        "no operator belongs to module 'layers.9'\n  try:   one of layers.0, layers.1, "
        "layers.2, layers.3",
    ),
    (
        Deep,
        2,
        {"stage_starts": ("layers_1",)},
        "no operator belongs to module 'layers_1'\n  try:   one of layers.0, layers.1, "
        "layers.2, layers.3",
    ),
    (
        Deep,
        3,
        {"stage_starts": ("layers.2", "layers.1")},
        "stage 2 begins at operator 'layers_1', not after stage 1 begins\n"
        "  why:   stage 1 begins at 'layers_2'; values would have to flow backwards\n"
        "  try:   list the stages in the order of the graph",
    ),
    (
        Deep,
        2,
        {"stage_starts": ("layers.2", "layers.3")},
        "2 stage starts for 2 stages\n"
        "  why:   2 positions x 1 chunks; the first stage begins at the beginning\n"
        "  try:   name 1 module paths",
    ),
    (
        Deep,
        2,
        {"actions": ("0F0 0B0 0F1 0B1", "1F1 1F0 1B0 1B1")},
        "schedule 'custom' deadlocks: ranks wait in a circle\n"
        "  where: rank 0 at 0B0 (action 1) -> rank 1 at 1F1 (action 0) -> rank 0\n"
        "  why:   0B0 on rank 0 waits for 1B0, which rank 1 runs after 1F1; "
        "1F1 on rank 1 waits for 0F1, which rank 0 runs after 0B0\n"
        "  try:   change the order of one of these ranks: on rank 0, 0F1 before 0B0",
    ),
    (
        Deep,
        2,
        {"actions": ("0F0 0B0 0F1", "1F0 1B0 1F1 1B1")},
        "schedule 'custom' lacks 1 actions: 0B1\n"
        "  why:   each of 2 stages runs each of 2 microbatches\n"
        "  try:   add them on the ranks of their stages; a backward is one B, or an I and a W",
    ),
    (
        Deep,
        2,
        {"actions": ("0F0 0B0", "1F0 1B0"), "num_microbatches": 2},
        "the actions are for another pipeline\n"
        "  why:   they have 2 positions and 1 microbatches; asked for are 2 and 2\n"
        "  try:   one text of actions for each position",
    ),
    (
        Deep,
        2,
        {"schedule": "1f2b"},
        "there is no schedule '1f2b' to train with\n  try:   one of gpipe, 1f1b, "
        "1f1b_interleaved, zb_h1, zb_v",
    ),
]


def refused(
    folder: Path, model: torch.nn.Module, num_ranks: int, options: dict[str, Any], **settings: Any
) -> str:
    settings = {"use_end2end": True} | settings
    config = ComputeConfig(
        plan_ngpus=num_ranks, runtime_ngpus=num_ranks, pas_config=options, **settings
    )
    with pytest.raises(ShardwrightError) as error:
        parallelize(model, X, "pp", config, gen_savedir=folder, load_module=False)
    return str(error.value)


@pytest.mark.parametrize(
    ("model", "num_ranks", "options", "text"),
    CASES,
    ids=[case[3].splitlines()[0] for case in CASES],
)
def test_what_a_pipeline_refuses(
    tmp_path: Path, model: type, num_ranks: int, options: dict[str, Any], text: str
) -> None:
    assert refused(tmp_path, model(), num_ranks, options) == text


def test_a_boundary_inside_a_recompute_region(tmp_path: Path) -> None:
    text = refused(tmp_path, Recomputed(), 2, {"stage_starts": ("layers.2",)})
    assert (
        text.splitlines()[0] == "stage 1 begins at operator 'layers_2', inside a recompute region"
    )
    where, why, hint = text.splitlines()[1:]
    assert (
        where.startswith("  where: ")
        and "test_refused_pipelines.py:" in where
        and where.endswith("(layers.2)")
    )
    assert why == "  why:   a region is recomputed as a whole, on the ranks of one stage"
    assert hint == "  try:   begin the stage before or after the region"


def test_a_pipeline_runs_whole_steps(tmp_path: Path) -> None:
    assert refused(tmp_path, Deep(), 2, {}, use_end2end=False) == (
        "policy 'pp' needs use_end2end=True\n"
        "  why:   a pipeline runs forward and backward of all samples itself, in train_step\n"
        "  try:   ComputeConfig(use_end2end=True, ...), on the command line --set "
        "use_end2end=true, with a model whose first result is the loss"
    )


def test_no_microbatches(tmp_path: Path) -> None:
    assert refused(tmp_path, Deep(), 2, {"num_microbatches": 0}) == (
        "a pipeline with 0 microbatches\n  try:   ask for at least one of the microbatches"
    )
