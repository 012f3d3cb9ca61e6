"""What a forward may read while no tensor has values: constants, known inputs, sizes, masks."""
