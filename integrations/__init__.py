"""Trainers of other libraries, which train what shardwright made parallel: ``transformers``
(Hugging Face's ``Trainer``) and ``fabric`` (Lightning Fabric). Each needs its library, and is
imported by name: ``from shardwright.integrations.transformers import ShardwrightTrainer``.
"""
