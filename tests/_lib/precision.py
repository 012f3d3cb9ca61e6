"""The product's own helper under the name tests use."""

from shardwright.frontend.verification.precision import float64_casts

__all__ = ["float64_casts"]
