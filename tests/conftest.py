"""What holds for all tests."""

from hypothesis import settings

# A loaded machine is no defect of the code under test.
settings.register_profile("shardwright", deadline=None)
settings.load_profile("shardwright")
