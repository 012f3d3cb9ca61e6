"""Data that knows the layout: which rank reads what, and loaders that go on exactly where they
stopped, under any plan, on any number of ranks.

    from shardwright import data

    loader = data.loader(dataset, model, global_batch=64, shuffle=True)
    for batch in loader:
        ...
    shardwright.save_checkpoint("checkpoints", model, optimizer, loader=loader)
"""

from shardwright.data.cursor_loader import CursorLoader, loader
from shardwright.data.cuts import EvenCut
from shardwright.data.packing import Packing, document_mask
from shardwright.data.rank_roles import Role, Roles, roles
from shardwright.data.stream_loader import StreamLoader

__all__ = [
    "CursorLoader",
    "EvenCut",
    "Packing",
    "Role",
    "Roles",
    "StreamLoader",
    "document_mask",
    "loader",
    "roles",
]
