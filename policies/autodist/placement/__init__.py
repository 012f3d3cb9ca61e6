"""The model on one mesh: what every operator does and how every tensor is held, as one problem of
pairwise costs.
"""
