"""Reasons against what a search tried, as an error has them."""

from __future__ import annotations

from shardwright.policies.autodist.candidates.results import SearchResult
from shardwright.policies.autodist.candidates.titles import MOST_LISTED, memory_words, refusals


def test_what_needs_least_is_said_first_and_the_rest_is_counted() -> None:
    needed = {f"tp={size}": 100.0 - size for size in range(2, 2 + MOST_LISTED + 3)}
    refused = {title: memory_words(bytes_, 10.0) for title, bytes_ in needed.items()}
    assert refusals(SearchResult(refused=refused, needed_bytes={**needed, "tp=99": 1.0})) == [
        *(
            f"tp={size}: it needs {100 - size} B on a device, and 10 B are allowed"
            for size in (8, 7, 6, 5)
        ),
        "3 more need as much or more",
    ]


def test_what_is_said_of_several_is_said_once() -> None:
    alike = {
        f"pp={count}": "the model cannot be cut into so many stages" for count in (2, 4, 8, 16)
    }
    assert refusals(
        SearchResult(refused={**alike, "x=4 zigzag x y=2": "every plan on it takes at least 10 s"})
    ) == [
        "pp=2, pp=4 and 2 more: the model cannot be cut into so many stages",
        "4 zigzag x 2 ranks: every plan on it takes at least 10 s",
    ]
    other = {f"x={number}": f"no placement: {number}" for number in range(MOST_LISTED + 2)}
    assert refusals(SearchResult(refused=other))[MOST_LISTED:] == ["and 2 more, for other reasons"]
    assert refusals(SearchResult()) == []
