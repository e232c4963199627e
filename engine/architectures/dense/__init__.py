"""Dense decoders, with an MLP in each layer; each module has one family."""
