"""Data that knows the layout: which rank reads what, and loaders that go on exactly where they
stopped, under any plan, on any number of ranks.

    from shardwright import data

    loader = data.loader(dataset, model, global_batch=64, shuffle=True)
    for batch in loader:
        ...
    shardwright.save_checkpoint("checkpoints", model, optimizer, loader=loader)
"""

from shardwright.data.cursor_loader import CursorLoader
from shardwright.data.cuts import EvenCut
from shardwright.data.energon.redist import redistribute
from shardwright.data.energon.savable_dataset import (
    SavableDataset,
    get_train_dataset,
    get_val_dataset,
)
from shardwright.data.energon.savable_loader import SavableLoader, get_loader, get_savable_loader
from shardwright.data.energon.worker_config import (
    WorkerConfig,
    default_worker_config,
    energon_worker_config,
)
from shardwright.data.formats.json_lines import JsonLines
from shardwright.data.formats.tables import Tables
from shardwright.data.formats.tar_shards import TarShards
from shardwright.data.formats.token_files import TokenFile, TokenWindows, write_token_file
from shardwright.data.make_loader import loader
from shardwright.data.packing import Packing, document_mask
from shardwright.data.rank_roles import Role, Roles, roles
from shardwright.data.stream_loader import StreamLoader

__all__ = [
    "CursorLoader",
    "EvenCut",
    "JsonLines",
    "Packing",
    "Role",
    "Roles",
    "SavableDataset",
    "SavableLoader",
    "StreamLoader",
    "Tables",
    "TarShards",
    "TokenFile",
    "TokenWindows",
    "WorkerConfig",
    "default_worker_config",
    "document_mask",
    "energon_worker_config",
    "get_loader",
    "get_savable_loader",
    "get_train_dataset",
    "get_val_dataset",
    "loader",
    "redistribute",
    "roles",
    "write_token_file",
]
