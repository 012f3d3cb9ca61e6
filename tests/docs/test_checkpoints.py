"""The examples of the page about checkpoints run."""

import re
from pathlib import Path

import torch
from mlp_files import make_batch, make_model, write_files
from mlp_training import adamw

import shardwright
from shardwright.runtime.loader import load_class
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.training.build_optimizer import build_optimizer

PAGE = Path(__file__).resolve().parents[2] / "docs" / "checkpoints.md"


def test_the_examples(tmp_path):
    example = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL):
        exec(block, example)
    files = write_files(
        tmp_path / "files", make_model(), 1, 2, {"plan_ngpus": 2, "runtime_ngpus": 2}
    )
    run = tmp_path / "run"

    def built():
        module = load_class(files)()
        optimizer = build_optimizer(module, adamw)
        return module, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)

    def train(rank):
        parts = built()
        example["train"](*parts, [make_batch(step) for step in range(3)], run, 0)
        again = built()
        step = example["resume"](*again, run)
        assert step == 3 and again[2].last_epoch == 3
        for (name, value), other in zip(
            parts[0].named_parameters(), again[0].parameters(), strict=True
        ):
            assert torch.equal(value, other), name
        return parts[0].state_dict(), parts[1].state_dict()

    states = run_ranks(2, train)
    assert len(list(run.glob("0*"))) == 2
    models = []
    for way in ("disk", "memory"):
        model = make_model(seed=1)
        optimizer = adamw(model.parameters())
        if way == "disk":
            assert example["to_one_device"](run, model, optimizer) == 3
        else:
            example["merge"](*zip(*states, strict=True), model, optimizer)
        models.append((model.state_dict(), optimizer.state_dict()["state"][1]["exp_avg"]))
    for name, value in models[0][0].items():
        assert torch.equal(value, models[1][0][name]), name
    assert torch.equal(models[0][1], models[1][1])
    model.config = {"model_type": "mlp"}
    example["to_hugging_face"](run, tmp_path / "out", model)

    def load(rank):
        module = load_class(files)()
        example["from_hugging_face"](tmp_path / "out", module)
        return module.state_dict()

    merged, _ = shardwright.merge_state_dicts(run_ranks(2, load))
    for name, value in models[0][0].items():
        assert torch.equal(value, merged[name]), name
