"""The places of an exchange are those of its description, and are worked out once."""

import pytest
import torch

from shardwright.runtime.layout import Mesh
from shardwright.runtime.ops import exchange_places as places
from shardwright.runtime.ranks.groups import RankMesh
from shardwright.runtime.ranks.threads import run_ranks


def test_places_are_worked_out_once_for_all_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    worked_out = []
    original = places._exchange_places
    monkeypatch.setattr(
        places, "_exchange_places", lambda *key: worked_out.append(key) or original(*key)
    )

    def rank(rank: int) -> None:
        ep = RankMesh(Mesh((("ep", 2),))).axis("ep")

        def found(num_tokens: int) -> places.ExchangePlaces:
            dims = ((num_tokens, ep),)
            return places.exchange_places((ep,), (ep,), dims, 4, torch.device("cpu"))

        first = found(8)
        for num_tokens in (8, 6, 8):
            found(num_tokens)
        assert found(8) is first
        # Sizes that are never the same again are not kept for ever.
        for num_tokens in range(10, 200):
            found(num_tokens)
        assert len(ep.worked_out) <= places._MOST_KNOWN
        if rank == 1:  # the example at the top of the file
            assert first.own.tolist() == [[4], [5], [6], [7]]
            assert [of.tolist() for of in first.receivers] == [[0, 0, 1, 1]]
            assert first.keys.tolist() == [16, 16, 0, 8]
            assert first.bounds.tolist() == [8, 16]
            assert first.num_tokens == 8

    run_ranks(2, rank)
    assert len(worked_out) == 2 * (2 + 190)
