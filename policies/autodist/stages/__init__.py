"""The model as a chain of blocks, and the best cut of it into pipeline stages."""
