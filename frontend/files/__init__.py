"""The files of a compiled module: when they are made, where they lie, and how all ranks get the
same ones.
"""
