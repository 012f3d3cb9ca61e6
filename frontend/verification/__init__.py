"""Check a plan against one device: all ranks as threads of this process, in float64."""
