"""The whole training run: ``shardwright train -c run.yaml``, in pieces that other loops use too."""
