"""Transfers of weights from a trainer to a running engine, by broadcast or by shared memory."""
