"""The operator tables, one file per kind of operator. Importing this package fills the registry."""
