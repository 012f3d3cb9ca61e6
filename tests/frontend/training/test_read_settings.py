"""Settings from a file and flags: every one is settable, what is not known is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwright.frontend.training.nnscaler_names import ORIGINAL_KEYS, renamed
from shardwright.frontend.training.read_settings import read_run
from shardwright.runtime.errors import ConfigError

RUN = """
output: out
model: {function: "m:make"}
data: {jsonl: rows.jsonl}
global_batch: 8
steps: 10
optimizer: {name: SGD, options: {lr: 1e-3, momentum: 0.9}}
"""

NNSCALER = """
output: out
model: {type: m.Net, args: {width: 4}}
dataset: {type: m.data}
optimizer: {type: torch.optim.AdamW, args: {lr: 0.1}, clip_gnorm: 1.0}
compute_config: {plan_ngpus: 2, use_zero: 1, rng: fast}
pas_policy: tp
global_batch_size: 8
micro_batch_size: 2
max_train_steps: 5
precision: bf16
checkpoint: {every_n_train_steps: 3, resume_from: last}
"""


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    return file


def test_flags_count_in_the_place_of_the_file(tmp_path: Path) -> None:
    file = written(tmp_path, RUN)
    flags = ["--steps", "3", "--optimizer.options.lr=2e-4", "--log.every-steps", "5"]
    read = read_run(file, flags)
    run = read.settings
    assert (run.steps, run.log.every_steps) == (3, 5)
    assert run.optimizer.options == {"lr": 2e-4, "momentum": 0.9}
    lines = dict(line.split(": ", 1) for line in str(read).splitlines())
    assert lines["steps"].split() == ["3", "#", "--steps"]
    assert lines["global_batch"].endswith(f"# {file}")
    assert lines["optimizer.options"].endswith(f"# --optimizer.options.lr; {file}") or lines[
        "optimizer.options"
    ].endswith(f"# {file}; --optimizer.options.lr")
    assert lines["precision"].split() == ["model", "#", "default"]
    # A mapping takes the place of all that the file has there.
    replaced = read_run(file, ["--optimizer.options={lr: 1}"]).settings
    assert replaced.optimizer.options == {"lr": 1}


def test_names_of_nnscaler(tmp_path: Path) -> None:
    read = read_run(written(tmp_path, NNSCALER))
    run = read.settings
    assert (run.model.function, dict(run.model.arguments)) == ("m.Net", {"width": 4})
    assert (run.parallel.policy, run.parallel.plan_ngpus, run.parallel.use_zero) == ("tp", 2, 1)
    assert run.parallel.compute == {"rng": "fast"}
    assert (run.global_batch, run.microbatch, run.steps) == (8, 2, 5)
    assert (run.precision, run.clip_norm, run.checkpoints.resume) == ("bfloat16", 1.0, "auto")
    assert "as max_train_steps" in str(read)
    # Every name of the table leads to a setting.
    known = [line.split(": ")[0] for line in str(read).splitlines()]
    for key in ORIGINAL_KEYS:
        assert ".".join(renamed(tuple(key.split(".")))) in known, key


REFUSED = {
    "--optimzer.name=SGD": "did you mean 'optimizer'?",
    "--optimizer.nam=SGD": "did you mean 'optimizer.name'?",
    "--steps=ten": "steps is a whole number or None",
    "--log.to=tensorboard": "log.to is a list, each element 'tensorboard' or 'wandb'\n"
    "  where: --log.to\n  why:   it is 'tensorboard', a str\n  try:   as a list: [tensorboard]",
    "--schedule.name=cos": "schedule.name is 'constant' or 'linear' or 'cosine'",
    "--parallel=tp": "parallel has settings of its own",
    "--model.transformers=gpt2": "model.function and model.transformers stand for the same",
    "--epochs=2": "steps and epochs stand for the same",
    "--data.length=8": "data.length would do nothing",
    "--evaluation.every_steps=2": "evaluation.data is missing",
    "--parallel.compute={use_zero: 2}": "parallel.compute.use_zero is not for compute",
    "--clip_norm=0": "clip_norm is above 0",
    "--output": "--output is given no value",
    "stray": "'stray' is no setting",
    "--max_train_steps=4": "",
}


@pytest.mark.parametrize("flag", REFUSED)
def test_what_is_no_setting_is_refused(flag: str, tmp_path: Path) -> None:
    file = written(tmp_path, RUN)
    if not REFUSED[flag]:  # another name of a setting, given in another place, counts
        assert read_run(file, [flag]).settings.steps == 4
        return
    with pytest.raises(ConfigError) as caught:
        read_run(file, [flag])
    assert REFUSED[flag] in str(caught.value), caught.value


def test_what_a_file_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="output and global_batch must be given"):
        read_run(written(tmp_path, "model: {function: a}\ndata: {jsonl: b}\nsteps: 1"))
    with pytest.raises(ConfigError, match="stand for the same setting"):
        read_run(written(tmp_path, RUN + "max_train_steps: 4"))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_run(tmp_path / "none.yaml")
