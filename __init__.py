"""shardwright: compile an ordinary PyTorch module for many devices."""
