"""The example of Megatron-Energon's documentation: data 2 x pipeline 2 x tensor 2."""

from itertools import chain

import pytest
from sample_files import numbered_shards
from spawn import run_processes


@pytest.mark.slow
def test_it_runs_as_written(tmp_path):
    numbered_shards(tmp_path / "coyo", 4, 15)
    numbered_shards(tmp_path / "coco", 2, 15, first=1000)
    (tmp_path / "coyo-coco-dataset.yaml").write_text(
        "__module__: megatron.energon\n"
        "__class__: MetadatasetV2\n"
        "splits:\n"
        "  train:\n"
        "    blend:\n"
        "      - {weight: 2, path: ./coyo}\n"
        "      - {weight: 1, path: ./coco}\n"
    )
    seen = run_processes(8, "data_jobs:the_documents_program", str(tmp_path))
    for rank in (2, 3, 6, 7):
        assert not any(seen[rank].values())
    for first, twin in ((0, 1), (4, 5)):
        assert seen[first] == seen[twin]
    for rank in (0, 1, 4, 5):
        mine = seen[rank]
        assert mine["next"] and mine["restored"] == mine["next"]
        assert mine["global"] == mine["from_source"] == mine["next"]
        assert mine["refused"] == "global_dst_rank=2 is not in the data-parallel group"
    batches = [batch for rank in (0, 4) for batch in seen[rank]["batches"] + seen[rank]["next"]]
    everything = list(chain.from_iterable(batches))
    assert len(everything) == len(set(everything)) == 32
    assert sorted(p.name for p in tmp_path.glob("*.pt")) == [
        "dataloader.pt",
        "dataloader_rank0.pt",
        "dataloader_rank1.pt",
    ]


@pytest.mark.slow
def test_states_are_collected_over_the_groups_of_a_plan(tmp_path):
    seen = run_processes(4, "data_jobs:states_of_a_plan", str(tmp_path / "mlp"))
    for rank, mine in enumerate(seen):
        replica = rank // 2
        for source in ("module", "mpu"):
            assert mine[source] == {
                "rank": replica,
                "global_rank": rank,
                "here": [0, 1] if rank in (0, 3) else None,
                "next": [10 * replica + 2, 10 * replica + 3],
            }
        assert mine["refused"].startswith(
            "the data-parallel group has 4 ranks, and the worker config says 2\n"
            "  why:   without data_parallel_group it is all ranks of the job"
        )
