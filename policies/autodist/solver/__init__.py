"""One strategy per node, least cost, within memory rows, with a proof: numbers only, nothing of
graphs, torch or plans.
"""
