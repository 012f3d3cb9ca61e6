"""What surrounds a trace: patches of torch, fake parameters, regions, places in the user's code."""
