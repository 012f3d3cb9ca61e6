"""Sources of samples on disk: each is a map-style dataset with a fingerprint, so that any of them
can be given to a loader.

=================  =====================================================================
file               what it reads
=================  =====================================================================
``tar_shards``     webdataset: tar files whose neighbours of one name make a sample
``json_lines``     a JSON value in each line
``tables``         parquet and arrow, through Hugging Face datasets
``token_files``    Megatron's ``.bin`` and ``.idx``: documents of token ids, memory-mapped
``source_files``   files that are read in pieces, and the indexes beside them
=================  =====================================================================
"""
