"""Measures the machine it runs on and writes it as a hardware file (``shardwright calibrate``)."""
