"""Bytes: what a step of training holds on a rank at every moment, and what for."""
