"""A small model in pipeline stages, and the files a compile of it would write, by hand.

What crosses stages: the hidden state (of every stage), a skip connection and a mask without
gradient (from the first stage to the last), an embedding tied to the head. Results are made by the
first stage (``count``) and the last (all others). Each stage has a batch norm, and an MLP that tp
cuts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from shardwright.runtime.layout import Layout, Mesh
from shardwright.runtime.manifest import Manifest, code_file, sha256
from shardwright.runtime.module.declarations import Declaration
from shardwright.runtime.pipeline.segment import Segment, Stage, Transfer
from shardwright.runtime.runs import piece
from shardwright.runtime.transfer import Box

WORDS, WIDTH, HIDDEN, BATCH = 9, 6, 10, 4


@dataclass(frozen=True)
class Pipe:
    """A pipeline of the model. ``ranks``: of each stage; as many ranks as that are its tp axis.
    ``cut``: the stages that send their hidden state in slices. ``actions``: by mode and rank.
    """

    ranks: tuple[tuple[int, ...], ...]
    num_microbatches: int
    train: dict[int, str] = field(default_factory=dict)
    infer: dict[int, str] = field(default_factory=dict)
    cut: tuple[int, ...] = ()
    dropout: float = 0.0
    hidden_loss: bool = False  # a result that is no loss comes first
    recompute: bool = False  # the MLPs are

    @property
    def num_stages(self) -> int:
        return len(self.ranks)

    @property
    def num_ranks(self) -> int:
        return 1 + max(rank for ranks in self.ranks for rank in ranks)

    @property
    def stages(self) -> tuple[Stage, ...]:
        return tuple(Stage(Mesh((("tp", len(ranks)),)), ranks) for ranks in self.ranks)

    @property
    def shared(self) -> dict[str, tuple[int, ...]]:
        return {"emb.weight": (0, self.num_stages - 1)} if self.num_stages > 1 and self.tied else {}

    @property
    def tied(self) -> bool:
        """Stages with unequal meshes share no parameters."""
        return len(self.ranks[0]) == len(self.ranks[-1])


class Net(nn.Module):
    """The model on one device, with a block for each stage."""

    def __init__(self, num_blocks: int, tied: bool = True, seed: int = 0) -> None:
        super().__init__()
        self.emb = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(nn.Module() for _ in range(num_blocks))
        for block in self.blocks:
            block.up = nn.Linear(WIDTH, HIDDEN)
            block.down = nn.Linear(HIDDEN, WIDTH)
            block.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.emb.weight
        self.double()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(
                    torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5
                )

    def forward(self, sample: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        tokens = sample["tokens"]
        skip = hidden = self.emb(tokens)
        even = tokens % 2 == 0
        for block in self.blocks:
            hidden = hidden + block.down(torch.tanh(block.up(hidden)))
            hidden = block.norm(hidden)
        logits = self.head(hidden + skip)
        loss = (
            (logits - sample["target"]) ** 2 * even[:, None]
        ).mean() + 0.1 * logits.square().mean()
        return loss, {"logits": logits, "count": even.sum(), "any": even.any()}


def make_sample(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(WORDS, (BATCH,), generator=generator)
    return {
        "tokens": tokens,
        "target": torch.randn(BATCH, WORDS, generator=generator, dtype=torch.float64),
    }


def declarations(pipe: Pipe, rank: int | None = None) -> list[Declaration]:
    """The tensors of one rank, or of all."""
    own = [k for k, ranks in enumerate(pipe.ranks) if rank is None or rank in ranks]
    found = []

    def add(kind: str, name: str, layout: str, stage: int, **keywords: object) -> None:
        found.append(
            Declaration(
                name,
                kind,
                Layout.parse(layout),
                torch.float64,
                requires_grad=kind == "parameter",
                stage=stage,
                **keywords,
            )
        )

    last = pipe.num_stages - 1
    if 0 in own or (last in own and pipe.tied):
        aliases = ("head.weight",) if pipe.tied else ()
        add(
            "parameter",
            "emb.weight",
            f"[{WORDS}, {WIDTH}]",
            0 if 0 in own else last,
            aliases=aliases,
        )
    for k in own:
        add("parameter", f"blocks.{k}.up.weight", f"[{HIDDEN}/tp, {WIDTH}]", k)
        add("parameter", f"blocks.{k}.up.bias", f"[{HIDDEN}/tp]", k)
        add("parameter", f"blocks.{k}.down.weight", f"[{WIDTH}, {HIDDEN}/tp]", k)
        add("parameter", f"blocks.{k}.down.bias", f"[{WIDTH}]", k)
        add("parameter", f"blocks.{k}.norm.weight", f"[{WIDTH}]", k)
        add("parameter", f"blocks.{k}.norm.bias", f"[{WIDTH}]", k)
    for k in own:
        add("buffer", f"blocks.{k}.norm.running_mean", f"[{WIDTH}]", k)
        add("buffer", f"blocks.{k}.norm.running_var", f"[{WIDTH}]", k)
    if last in own and not pipe.tied:
        add("parameter", "head.weight", f"[{WORDS}, {WIDTH}]", last)
    return found


Pieces = dict[tuple[int, int], list[tuple[Box, Box]]]
"""(sender, receiver) to (box at the sender, box at the receiver)."""


def _route(
    pipe: Pipe, name: str, source: int, target: int, shape: tuple[int, ...]
) -> tuple[Pieces, Pieces]:
    """Who sends which part forward and backward."""
    senders, receivers = pipe.ranks[source], pipe.ranks[target]
    forward: Pieces = {}
    backward: Pieces = {}
    whole: Box = tuple((0, size) for size in shape)
    if name == "hidden" and source in pipe.cut:
        rows, columns = shape
        for i, sender in enumerate(senders):
            start, size = piece(columns, len(senders), i)
            here, there = ((0, rows), (0, size)), ((0, rows), (start, start + size))
            for receiver in receivers:
                forward.setdefault((sender, receiver), []).append((here, there))
            receiver = sender if sender in receivers else receivers[i % len(receivers)]
            backward.setdefault((receiver, sender), []).append((there, here))
        return forward, backward
    for j, receiver in enumerate(receivers):
        if receiver in senders:
            forward[receiver, receiver] = [(whole, whole)]
        # Each copy sends some columns, so that they share the work.
        elif name == "hidden" and len(senders) > 1:
            for i, sender in enumerate(senders):
                start, size = piece(shape[1], len(senders), i)
                box = ((0, shape[0]), (start, start + size))
                forward.setdefault((sender, receiver), []).append((box, box))
        else:
            forward[senders[j % len(senders)], receiver] = [(whole, whole)]
    for sender in senders:
        if sender in receivers:
            backward[sender, sender] = [(whole, whole)]
        else:  # each copy sends some rows of the gradient
            for j, receiver in enumerate(receivers):
                start, size = piece(shape[0], len(receivers), j)
                box = ((start, start + size), *whole[1:])
                backward.setdefault((receiver, sender), []).append((box, box))
    return forward, backward


def _crossings(pipe: Pipe) -> list[tuple[str, int, int, tuple[int, ...], torch.dtype, bool]]:
    last = pipe.num_stages - 1
    found = [("hidden", k, k + 1, (BATCH, WIDTH), torch.float64, True) for k in range(last)]
    if last:
        found.append(("skip", 0, last, (BATCH, WIDTH), torch.float64, True))
        found.append(("even", 0, last, (BATCH,), torch.bool, False))
    return found


def segment(pipe: Pipe, stage: int, rank: int) -> Segment:
    receives, sends = [], []
    for name, source, target, shape, dtype, differentiable in _crossings(pipe):
        forward, backward = _route(pipe, name, source, target, shape)
        if not differentiable:
            backward = {}
        if source == stage:
            local = shape
            if name == "hidden" and source in pipe.cut:
                local = (
                    shape[0],
                    piece(shape[1], len(pipe.ranks[source]), pipe.ranks[source].index(rank))[1],
                )
            out = [(r, here) for (s, r), boxes in forward.items() if s == rank for here, _ in boxes]
            back = [
                (s, there) for (s, r), boxes in backward.items() if r == rank for _, there in boxes
            ]
            sends.append(
                Transfer(name, target, dtype, local, differentiable, tuple(out), tuple(back))
            )
        if target == stage:
            come = [
                (s, there) for (s, r), boxes in forward.items() if r == rank for _, there in boxes
            ]
            back = [
                (r, here) for (s, r), boxes in backward.items() if s == rank for here, _ in boxes
            ]
            receives.append(
                Transfer(name, source, dtype, shape, differentiable, tuple(come), tuple(back))
            )
    last = pipe.num_stages - 1
    reads = (
        *(["sample.tokens"] if stage == 0 else []),
        *(["sample.target"] if stage == last else []),
    )
    outputs = (
        *(["0", "1.logits", "1.any"] if stage == last else []),
        *(["1.count"] if stage == 0 else []),
    )
    return Segment(reads, tuple(receives), tuple(sends), outputs)


def _stage_lines(pipe: Pipe, stage: int, rank: int) -> list[str]:
    last = pipe.num_stages - 1
    seg = segment(pipe, stage, rank)
    arguments = [path.rpartition(".")[2] for path in seg.reads] + [t.name for t in seg.receives]
    lines = ["tp = self.axis('tp')"]
    if stage == 0:
        lines += [
            "hidden = F.embedding(tokens, self.emb.weight)",
            "skip = hidden",
            "even = tokens % 2 == 0",
        ]
    lines += [
        f"block = self.blocks[{stage}]",
        "hidden = self.recompute(self.mlp, block, hidden)"
        if pipe.recompute
        else "hidden = self.mlp(block, hidden)",
        "mean, var = block.norm.running_mean.clone(), block.norm.running_var.clone()",
        (
            "hidden = F.batch_norm(hidden, mean, var, block.norm.weight, block.norm.bias, "
            "self.training, 0.1, 1e-5)"
        ),
        "if self.training:",
        f"    self.update_buffer('blocks.{stage}.norm.running_mean', mean)",
        f"    self.update_buffer('blocks.{stage}.norm.running_var', var)",
    ]
    if pipe.dropout:
        lines.append(f"hidden = self.random.drop{stage}(hidden, {pipe.dropout}, self.training)")
    sent = [t.name for t in seg.sends]
    if stage in pipe.cut:
        lines.append("piece = narrow(hidden, tp, 1)")
        sent = ["piece" if name == "hidden" else name for name in sent]
    if stage == last:
        lines += [
            "logits = F.linear(hidden + skip, self.head.weight)",
            "loss = ((logits - target) ** 2 * even[:, None]).mean() + 0.1 * logits.square().mean()",
        ]
        sent += ["logits" if pipe.hidden_loss else "loss", "logits", "even.any()"]
    if stage == 0:
        sent.append("even.sum()")
    return [
        f"def stage{stage}({', '.join(['self', *arguments])}):",
        *(f"    {line}" for line in lines),
        f"    return ({', '.join(sent)},)",
    ]


def source(pipe: Pipe, rank: int) -> str:
    own = [k for k, ranks in enumerate(pipe.ranks) if rank in ranks]
    last = pipe.num_stages - 1
    declared = []
    for d in declarations(pipe, rank):
        aliases = f", aliases={d.aliases!r}" if d.aliases else ""
        declared.append(
            f"        self.{d.kind}({d.name!r}, {str(d.layout)!r}, torch.float64{aliases}, "
            f"stage={d.stage})"
        )
    if pipe.dropout:
        layout = f"[{BATCH}, {WIDTH}]"
        declared += [
            f"        self.random_function('drop{k}', dropout, layout={layout!r})" for k in own
        ]
    methods = "\n\n".join(
        "\n".join(f"    {line}" for line in _stage_lines(pipe, k, rank)) for k in own
    )
    loss_shape = (BATCH, WORDS) if pipe.hidden_loss else ()
    return f"""import torch
import torch.nn.functional as F

from shardwright.runtime.adapters import all_reduce, grad_all_reduce, narrow
from shardwright.runtime.layout import Mesh
from shardwright.runtime.ops.dropout import dropout
from shardwright.runtime.pipeline.module import PipelineModule
from shardwright.runtime.pipeline.segment import Segment, Stage, Transfer


class Net(PipelineModule):
    stages = {pipe.stages!r}
    rank = {rank}
    rng_mode = "plan_independent"
    inputs = {{
        "sample.tokens": ("[{BATCH}]", torch.int64),
        "sample.target": ("[{BATCH}, {WORDS}]", torch.float64),
    }}
    arguments = ("sample",)
    num_microbatches = {pipe.num_microbatches}
    schedule = "by hand"
    actions = {{"train": {pipe.train.get(rank, "")!r}, "infer": {pipe.infer.get(rank, "")!r}}}
    segments = {{ {", ".join(f"{k}: {segment(pipe, k, rank)!r}" for k in own)} }}
    output_stages = {{
        "0": ({last}, {loss_shape}, torch.float64),
        "1.logits": ({last}, ({BATCH}, {WORDS}), torch.float64),
        "1.any": ({last}, (), torch.bool),
        "1.count": (0, (), torch.int64),
    }}
    shared = {pipe.shared!r}

    def declare(self):
{chr(10).join(declared)}

{methods}

    runs = 0

    def mlp(self, block, hidden):
        self.runs += 1
        tp = self.axis("tp")
        inner = torch.tanh(F.linear(grad_all_reduce(hidden, tp), block.up.weight, block.up.bias))
        return hidden + all_reduce(F.linear(inner, block.down.weight), tp) + block.down.bias

    def output(self, leaves):
        inner = {{name: leaves[f"1.{{name}}"] for name in ("logits", "count", "any", "dropped")}}
        return (leaves["0"], inner)
"""


def write_files(directory: Path, pipe: Pipe, model: Net) -> Path:
    """What a compile of ``model`` would leave in ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    files = {}
    for rank in range(pipe.num_ranks):
        text = source(pipe, rank).encode()
        (directory / code_file(rank)).write_bytes(text)
        files[code_file(rank)] = sha256(text)
    tensors = {d.name: d for d in declarations(pipe)}
    state = model.state_dict()
    save_file({name: state[name].clone() for name in tensors}, directory / "weights.safetensors")
    mesh = Mesh((("rank", pipe.num_ranks),))
    Manifest(
        key="0" * 64, class_name="Net", mesh=mesh, policy="by hand", files=files, tensors=tensors
    ).write(directory)
    return directory
