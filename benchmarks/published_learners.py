"""Models that learn from rows of a table and know nothing of machines.

A learner gets features and targets of some rows and predicts the targets of others. What the best
of them reach on rows that were left out tells what can be learned from a table, whatever the cause:

    learned = left_out(gaussian_process, features, np.log(seconds), folds)

``features``: rows by features, each column with mean 0 and spread 1 (:func:`standardized`).
``folds``: arrays of row numbers; rows of a fold are predicted by what all others tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

Array = np.ndarray
Learner = Callable[[Array, Array, Array], Array]
"""Features and targets that are known, features of others -> targets of the others."""

TRIES = 80
"""How many random settings of a Gaussian process are compared by their likelihood."""

ROUNDS, RATE, DEPTH, LEAF = 120, 0.1, 2, 3
"""Boosted trees: how many, how much of each counts, how deep they are, and how many rows a leaf has
at least.
"""

RIDGE = 1.0
"""What a squared weight of :func:`ranking` costs, beside pairs in the wrong order."""


def standardized(columns: Iterable[Array]) -> Array:
    """Columns as features. A column without spread tells nothing, and is left out."""
    kept = [column for column in columns if np.std(column) > 0]
    return np.stack([(column - np.mean(column)) / np.std(column) for column in kept], axis=1)


def left_out(learner: Learner, features: Array, targets: Array, folds: Iterable[Array]) -> Array:
    """The target of each row of ``folds``, learned from the rows outside its fold."""
    found = np.full(len(targets), np.nan)
    everything = np.arange(len(targets))
    for fold in folds:
        known = np.setdiff1d(everything, fold)
        found[fold] = learner(features[known], targets[known], features[fold])
    return found


def gaussian_process(known: Array, targets: Array, others: Array) -> Array:
    """A Gaussian process with a length for each feature. Lengths, size and noise are those of
    ``TRIES`` random ones under which the targets are most likely.
    """
    rng = np.random.default_rng(0)
    mean, best, found = targets.mean(), -np.inf, np.full(len(others), targets.mean())
    squares = (known[:, None] - known[None]) ** 2
    across = (others[:, None] - known[None]) ** 2
    for _ in range(TRIES):
        lengths = np.exp(rng.uniform(np.log(0.3), np.log(10), known.shape[1]))
        size, noise = np.exp(rng.uniform(np.log([0.05, 0.005]), np.log([1.0, 0.2])))
        covariance = size**2 * np.exp(-0.5 * squares @ lengths**-2)
        factor = np.linalg.cholesky(covariance + noise**2 * np.eye(len(known)))
        white = np.linalg.solve(factor, targets - mean)
        likelihood = -0.5 * white @ white - np.log(np.diag(factor)).sum()
        if likelihood > best:
            best = likelihood
            weights = np.linalg.solve(factor.T, white)
            found = mean + size**2 * np.exp(-0.5 * across @ lengths**-2) @ weights
    return found


def boosted_trees(known: Array, targets: Array, others: Array) -> Array:
    """Small regression trees, each fitted to what those before it leave (Friedman 2001)."""
    ours = np.full(len(known), targets.mean())
    theirs = np.full(len(others), targets.mean())
    for _ in range(ROUNDS):
        of_known, of_others = _tree(known, targets - ours, others, DEPTH)
        ours += RATE * of_known
        theirs += RATE * of_others
    return theirs


def _tree(known: Array, targets: Array, others: Array, depth: int) -> tuple[Array, Array]:
    """What one tree says of the rows it was fitted to, and of others."""
    cut = _best_cut(known, targets) if depth else None
    if cut is None:
        return np.full(len(known), targets.mean()), np.full(len(others), targets.mean())
    column, edge = cut
    of_known, of_others = np.empty(len(known)), np.empty(len(others))
    for side in (True, False):
        near = (known[:, column] <= edge) == side
        far = (others[:, column] <= edge) == side
        inside = _tree(known[near], targets[near], others[far], depth - 1)
        of_known[near], of_others[far] = inside
    return of_known, of_others


def _best_cut(known: Array, targets: Array) -> tuple[int, float] | None:
    """The column and the value below which targets differ most from those above."""
    best, found, count = 0.0, None, len(targets)
    below = np.arange(1, count)
    for column, values in enumerate(known.T):
        order = np.argsort(values, kind="stable")
        sums = np.cumsum(targets[order] - targets.mean())[:-1]
        gains = sums**2 / below + sums**2 / (count - below)
        allowed = (np.diff(values[order]) > 0) & (below >= LEAF) & (count - below >= LEAF)
        gains[~allowed] = 0.0
        at = int(np.argmax(gains)) if len(gains) else 0
        if len(gains) and gains[at] > best + 1e-12:
            best, found = gains[at], (column, float(values[order][at]))
    return found


def ranking(known: Array, targets: Array, others: Array) -> Array:
    """Scores that put rows in order. Which of two rows has the larger target is a logistic function
    of the difference of their scores (Bradley and Terry), and a score is quadratic in the features.
    """
    ours, theirs = _quadratic(known), _quadratic(others)
    first, second = np.triu_indices(len(known), 1)
    swapped = (targets[first] < targets[second])[:, None]
    steps = np.where(swapped, ours[second] - ours[first], ours[first] - ours[second])
    weights = np.zeros(ours.shape[1])
    for _ in range(25):  # Newton's method on a convex function
        wrong = 1 / (1 + np.exp(np.clip(steps @ weights, -30, 30)))
        slope = RIDGE * weights - steps.T @ wrong
        bend = (steps * (wrong * (1 - wrong))[:, None]).T @ steps
        weights -= np.linalg.solve(bend + RIDGE * np.eye(len(weights)), slope)
    return theirs @ weights


def _quadratic(features: Array) -> Array:
    """Features, their squares and products."""
    first, second = np.triu_indices(features.shape[1])
    return np.hstack([features, features[:, first] * features[:, second]])
