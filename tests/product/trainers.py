"""Hugging Face's Trainer, Lightning Fabric and adapters of peft, on ten families of transformers.

    python tests/product/trainers.py parity                   # plans on 2 and 4 ranks
    python tests/product/trainers.py parity --family llama --kind "Trainer, LoRA"
    python tests/product/trainers.py kills                    # killed, then resumed elsewhere

``parity``: each kind of trainer under each plan, in float64: losses and norms of all steps, and the
weights after them, against one device under the bound of parity. Ranks are gloo processes; all runs
of as many ranks are one job. ``kills``: a rank of a job is killed at a step between checkpoints;
another job goes on from the newest one, on other ranks and under another plan, twice. What comes
out is compared in the same way with one device that nobody stopped.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIB = Path(__file__).resolve().parents[1] / "_lib"
sys.path[:0] = [str(Path(__file__).resolve().parent), str(LIB), str(LIB / "of_one_test")]

import peft_models  # noqa: E402
import torch  # noqa: E402
import trainings  # noqa: E402
import transformers  # noqa: E402
from parity import assert_close_tree  # noqa: E402
from precision import float64_casts  # noqa: E402
from spawn import run_script  # noqa: E402

import shardwright  # noqa: E402

STEPS, GLOBAL_BATCH, LENGTH, VOCABULARY = 6, 8, 8, 16

PLANS: dict[str, tuple[int, int, dict[str, Any]]] = {
    # ranks, those of a unit, fields of the config
    "dp 2": (2, 1, {}),
    "zero3 2": (2, 1, {"use_zero": 3}),
    "tp 2": (2, 2, {}),
    "dp 4": (4, 1, {}),
    "zero3 4": (4, 1, {"use_zero": 3}),
    "tp 2 x 2 units": (4, 2, {"use_zero": 1}),
    "tp 2 x 2 units, zero3": (4, 2, {"use_zero": 3}),
}
STAGES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "pp 2": (2, 2, {"pas_policy": "pp"}),
    "pp 2 x 2 units, zero1": (4, 2, {"pas_policy": "pp", "use_zero": 1}),
    "hybrid 2 x tp 2": (4, 4, {"pas_policy": "hybrid"}),
}
"""Pipelines run whole steps, of which Fabric leaves one kind to its user."""

KINDS = ("Trainer", "Trainer, LoRA", "Fabric")
HYBRID = {"hybrid 2 x tp 2": (4, 4, {"use_end2end": True, "pas_config": {"num_microbatches": 2}})}
PLANS_OF = {
    "Trainer": {**PLANS, **STAGES},
    "Trainer, LoRA": {**PLANS, **STAGES},
    "Fabric": {**PLANS, **HYBRID},
}

SAVED_EVERY = 2

KILLS: dict[str, tuple[tuple[str, int | None], ...]] = {
    # The plan of each job, and the step after which one of its ranks is killed.
    "Trainer": (("tp 2", 3), ("pp 2 x 2 units, zero1", 5), ("zero3 2", None)),
    "Trainer, LoRA": (("pp 2", 3), ("tp 2 x 2 units, zero3", 5), ("dp 2", None)),
    "Fabric": (("tp 2", 3), ("hybrid 2 x tp 2", 5), ("zero3 2", None)),
}
"""Each job goes on from the newest checkpoint of the one before."""


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Tokens of which the later ones of some samples do not count."""

    def __len__(self) -> int:
        return STEPS * GLOBAL_BATCH

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(3, VOCABULARY, (LENGTH,), generator=generator)
        labels = ids.clone()
        labels[LENGTH - index % 4 :] = -100
        return {"input_ids": ids, "labels": labels}


def model_of(family: str, kind: str) -> Any:
    """The tiny model, in float64."""
    torch.manual_seed(0)
    if "LoRA" not in kind:
        return trainings.family(family).train()
    return peft_models.adapted(
        lambda: trainings.family(family), target_modules="all-linear", task_type="CAUSAL_LM"
    )


Found = dict[str, Any]
"""Losses and norms of the steps, and the weights after them."""


# Hugging Face's Trainer


class Kill(transformers.TrainerCallback):
    """Kills the last rank when a step is over."""

    def __init__(self, after: int | None) -> None:
        self.after = after

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kill(state.global_step, self.after)


def kill(step: int, after: int | None) -> None:
    """End this process at once if it is the last rank, and ``step`` the one to do it after."""
    if step == after and int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        os.kill(os.getpid(), signal.SIGKILL)


def by_trainer(
    family: str, kind: str, plan: str | None, out: Path, killed: bool, after: int | None
) -> Found:
    """Train with the stock Trainer (no plan), or with ours. ``killed``: save checkpoints, and go on
    from the newest; ``after``: the step to kill a rank after.
    """
    ranks, unit, fields = (1, 1, {}) if plan is None else PLANS_OF[kind][plan]
    units = ranks // unit
    arguments = transformers.TrainingArguments(
        str(out), per_device_train_batch_size=GLOBAL_BATCH // 2 // units, max_steps=STEPS,
        gradient_accumulation_steps=2, max_grad_norm=0.3, weight_decay=0.1, learning_rate=1e-2,
        adam_epsilon=1e-4, warmup_steps=2, lr_scheduler_type="cosine", logging_steps=1,
        save_strategy="steps" if killed else "no", save_steps=SAVED_EVERY, report_to=[],
        use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    options: Any = {"model": model_of(family, kind), "args": arguments, "train_dataset": Rows()}
    with float64_casts():
        if plan is None:
            trainer: Any = transformers.Trainer(**options)
        else:
            from shardwright.integrations.transformers import ShardwrightTrainer

            trainer = ShardwrightTrainer(
                **options,
                parallel={"plan_ngpus": unit, **fields},
                initialize_options={"gen_savedir": str(out / "gen")},
            )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.add_callback(Kill(after))
        trainer.train(resume_from_checkpoint=any(out.glob("checkpoint-*")))
    trainer.save_model(str(out / "final"))
    steps = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return {
        "loss": _tensor([entry["loss"] for entry in steps]),
        "norm": _tensor([entry["grad_norm"] for entry in steps]),
        "weights": _weights(out / "final"),
    }


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    (file,) = folder.glob("*model.safetensors")
    return load_file(file)


def _tensor(numbers: list[float]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


# Lightning Fabric


class Scored(torch.nn.Module):
    """A model of transformers whose loss is a sum over the tokens that count, so that halves of a
    batch add up. ``scale``: one over their number in the whole batch.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, scale: torch.Tensor
    ) -> torch.Tensor:
        logits = self.model(input_ids=input_ids, use_cache=False).logits[:, :-1]
        return scale * torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
        )


def by_fabric(
    family: str, kind: str, plan: str | None, out: Path, killed: bool, after: int | None
) -> Found:
    """Train with a plain loop (no plan), or with Fabric. ``killed`` and ``after`` as above."""
    module: Any
    data = [Rows()[index] for index in range(len(Rows()))]
    with float64_casts():
        module = Scored(model_of(family, kind))
        if plan is None:
            optimizer: Any = torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-4)
            return _alone(module, optimizer, data)
        from lightning_fabric import Fabric

        from shardwright.integrations.fabric import ShardwrightStrategy

        ranks, unit, fields = PLANS_OF["Fabric"][plan]
        fabric = Fabric(accelerator="cpu", devices=ranks, strategy=ShardwrightStrategy())
        fabric.launch()
        units, ends = ranks // unit, bool(fields.get("use_end2end"))
        config = shardwright.ComputeConfig(plan_ngpus=unit, runtime_ngpus=ranks, **fields)
        batch = GLOBAL_BATCH // 2 // units
        policy = "tp" if unit > 1 else "dp"
        if ends:
            policy = "hybrid"
        # With a scale of its own for each: equal numbers would be taken for one.
        example = {**_stacked(data[:batch]), "scale": torch.tensor(0.1, dtype=torch.float64)}
        made = shardwright.parallelize(
            module, example, policy, config, gen_savedir=str(out / "gen"), reuse="override"
        )
        optimizer = shardwright.build_optimizer(made, torch.optim.AdamW, lr=1e-2, eps=1e-4)
        setup, optimizer = fabric.setup(made, optimizer)
        losses: list[float] = []
        norms: list[float] = []
        state = {"model": setup, "optimizer": optimizer, "losses": losses, "norms": norms}
        saves = out / "saves"
        if saves.exists():
            fabric.load(saves, state)
            losses, norms = state["losses"], state["norms"]
        unit_index = made.ranks.unit
        for step in range(len(losses), STEPS):
            halves = _halves(data[step * GLOBAL_BATCH : (step + 1) * GLOBAL_BATCH])
            mine = [
                {**_stacked(rows[unit_index * batch : (unit_index + 1) * batch]), "scale": scale}
                for rows, scale in halves
            ]
            total = torch.zeros((), dtype=torch.float64)
            if ends:
                total += sum(made.train_step(mine))
            else:
                optimizer.zero_grad()
                for index, sample in enumerate(mine):
                    with fabric.no_backward_sync(setup, enabled=index == 0):
                        loss = setup(**sample)
                        fabric.backward(loss)
                    total += loss.detach()
            norms.append(float(fabric.clip_gradients(setup, optimizer, max_norm=0.3)))
            optimizer.step()
            if units > 1:
                total = made.ranks.group((), across_units=True).all_reduce(total, "sum")
            losses.append(float(total))
            kill(step + 1, after)
            if killed and (step + 1) % SAVED_EVERY == 0:
                fabric.save(saves, {**state, "losses": losses, "norms": norms})
        shardwright.save_checkpoint(out / "final", made)
    found = {"loss": _tensor(losses), "norm": _tensor(norms)}
    if fabric.global_rank == 0:
        shardwright.merge_checkpoint(out / "final", out / "whole")
        found["weights"] = _whole(out / "whole")
    return found


def _alone(module: Any, optimizer: Any, data: list[Any]) -> Found:
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for rows, scale in _halves(data[step * GLOBAL_BATCH : (step + 1) * GLOBAL_BATCH]):
            loss = module(**_stacked(rows), scale=scale)
            loss.backward()
            total += float(loss)
        norms.append(float(torch.nn.utils.clip_grad_norm_(module.parameters(), 0.3)))
        optimizer.step()
        losses.append(total)
    weights = {name: x.detach() for name, x in module.named_parameters()}
    return {"loss": _tensor(losses), "norm": _tensor(norms), "weights": weights}


def _halves(rows: list[Any]) -> list[tuple[list[Any], torch.Tensor]]:
    """Both halves of a global batch, with one over its number of tokens."""
    count = sum(int(row["labels"][1:].ne(-100).sum()) for row in rows)
    scale = torch.tensor(1.0 / count, dtype=torch.float64)
    half = GLOBAL_BATCH // 2
    return [(rows[:half], scale), (rows[half:], scale)]


def _stacked(rows: list[Any]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels")}


def _whole(place: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    files = sorted(place.glob("**/*.safetensors")) if place.is_dir() else [place]
    return {name: x for file in files for name, x in load_file(file).items()}


BY: dict[str, Callable[..., Found]] = {
    "Trainer": by_trainer, "Trainer, LoRA": by_trainer, "Fabric": by_fabric,
}  # fmt: skip


# Jobs


Run = tuple[str, str, str | None, str, bool, int | None]
"""Family, kind, plan, folder, whether it is one of several jobs, the step to kill a rank after."""


def take(runs: list[Run]) -> None:
    """What a rank does: all runs, one after the other. Rank 0 writes what each has found."""
    transformers.logging.set_verbosity_error()
    for family, kind, plan, out, killed, after in runs:
        folder = Path(out)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            found = BY[kind](family, kind, plan, folder, killed, after)
        except Exception:
            # Ranks meet the same error, or wait for one that has: the job is over for both.
            (folder / f"error{os.environ.get('RANK', 0)}.txt").write_text(traceback.format_exc())
            raise
        if int(os.environ.get("RANK", 0)) == 0:
            torch.save(found, folder / "found.pt")
    if torch.distributed.is_initialized():
        # The key-value store lies in the process of rank 0, which must not end first.
        torch.distributed.barrier()


def job(num_ranks: int, folder: Path, runs: list[Run]) -> None:
    """Take runs on processes. What a run has found, or why not, lies in its folder."""
    script = f"job{num_ranks}.py"
    (folder / script).write_text(
        f"import sys; sys.path[:0] = {sys.path!r}\nfrom trainers import take\ntake({runs!r})\n"
    )
    try:
        run_script(num_ranks, folder, script)
    except Exception as error:
        (folder / "ended.txt").write_text(str(error))


def told(name: str, out: Path, expected: Path) -> bool:
    """Compare, and say so."""
    try:
        found, reference = torch.load(out / "found.pt"), torch.load(expected / "found.pt")
        for key in ("loss", "norm", "weights"):
            assert_close_tree(found[key], reference[key], key)
        verdict = "equal"
    except FileNotFoundError:
        errors = sorted(out.glob("error*.txt"))
        verdict = f"FAILED {errors[0].read_text() if errors else 'without a word'}"
    except AssertionError as error:
        verdict = f"DIFFERS\n{error}"
    print(f"{name:50} {verdict}", flush=True)
    return verdict == "equal"


def parity(folder: Path, families: list[str], kinds: list[str]) -> list[bool]:
    """Every kind under every plan, family after family."""
    results = []
    for family in families:
        place = folder / family
        place.mkdir(parents=True)
        for num_ranks in (1, 2, 4):
            runs: list[Run] = []
            for kind in kinds:
                plans = (
                    {None: 1} if num_ranks == 1 else {p: v[0] for p, v in PLANS_OF[kind].items()}
                )
                runs += [
                    (family, kind, plan, str(_place(place, kind, plan)), False, None)
                    for plan, ranks in plans.items()
                    if ranks == num_ranks
                ]
            job(num_ranks, place, runs)
            if num_ranks > 1:
                results += [
                    told(f"{f:10} {k:14} {p}", Path(out), _place(place, k, None))
                    for f, k, p, out, *_ in runs
                ]
    return results


def kills(folder: Path, families: list[str], kinds: list[str]) -> list[bool]:
    """Every kind, killed twice."""
    results = []
    for family in families:
        place = folder / family
        place.mkdir(parents=True)
        for kind in kinds:
            alone, out = _place(place, kind, None), _place(place, kind, "killed")
            job(1, place, [(family, kind, None, str(alone), False, None)])
            for plan, after in KILLS[kind]:
                ranks = PLANS_OF[kind][plan][0]
                job(ranks, place, [(family, kind, plan, str(out), True, after)])
                found = (out / "found.pt").exists()
                assert found == (after is None), f"{plan} was to be killed after {after}"
            results.append(told(f"{family:10} {kind:14} killed twice", out, alone))
    return results


def _place(place: Path, kind: str, plan: str | None) -> Path:
    return place / f"{kind} {plan or 'alone'}".replace(", ", "-").replace(" ", "-")


def main() -> int:
    """Compare, and say how many are equal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("parity", "kills"))
    parser.add_argument("--family", choices=tuple(trainings.FAMILIES))
    parser.add_argument("--kind", choices=KINDS)
    options = parser.parse_args()
    families = [options.family] if options.family else list(trainings.FAMILIES)
    kinds = [options.kind] if options.kind else list(KINDS)
    with tempfile.TemporaryDirectory() as folder:
        results = {"parity": parity, "kills": kills}[options.what](Path(folder), families, kinds)
    print(f"{sum(results)} of {len(results)} equal")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
