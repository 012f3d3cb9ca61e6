"""What torch says of operators that run on tensors without memory: the bytes they make, keep and
need.
"""
