"""Pipelines at run time: stages on sub-meshes, what crosses between them, and the executor of a
schedule.
"""
